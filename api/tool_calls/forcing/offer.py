"""Offer: what a model may call; and the rule of the calls that it may write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.structured_output.lark import Lark
from api.tool_calls.reading.deltas import Tool


@dataclass(frozen=True, slots=True)
class Offer:
    """What a model may call.

    Attributes:
        schemas: of the arguments, in the order of the tools.
        is_parallel: an answer may have several calls.
    """

    tools: Sequence[Tool]
    schemas: Sequence[Mapping[str, Any]]
    is_parallel: bool

    def each(self) -> list[tuple[Tool, Mapping[str, Any]]]:
        return list(zip(self.tools, self.schemas, strict=True))

    def pairs(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Names of functions, and schemas of their arguments."""
        return [(tool.name, schema) for tool, schema in self.each()]


@dataclass(frozen=True, slots=True)
class CallsRule:
    """The calls of an answer, in a grammar.

    Attributes:
        mark: the mark with which they begin; "" if there is none.
        rest: the expression of what follows the mark.
        first: without a mark, the character with which they begin.
    """

    mark: str
    rest: str
    first: str = ""


def calls_between(lark: Lark, offer: Offer, open: str, call: str, close: str) -> CallsRule:
    """A call between two marks; several are on lines of their own."""
    one = f"{call} {lark.mark(close)}"
    more = f' ("\\n" {lark.mark(open)} {one})*' if offer.is_parallel else ""
    return CallsRule(open, one + more)
