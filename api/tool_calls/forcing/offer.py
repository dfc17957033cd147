"""Forced tools: the functions that a model may call, and the rule of its calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.structured_output.lark import Lark
from api.tool_calls.reading.deltas import Tool

COMMA = '", "'


@dataclass(frozen=True, slots=True)
class ForcedTools:
    """What a model may call.

    Attributes:
        tools: each with the schema that is forced of its arguments.
        is_parallel: an answer may have several calls.
    """

    tools: Sequence[tuple[Tool, Mapping[str, Any]]]
    is_parallel: bool

    def calls(self, call: str, between: str) -> str:
        """One call; if calls are parallel, or several of them with an expression between them."""
        return f"{call} ({between} {call})*" if self.is_parallel else call


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


Rule = Callable[[Lark, ForcedTools], CallsRule]


def calls_between(lark: Lark, forced: ForcedTools, open: str, call: str, close: str) -> CallsRule:
    """A call between two marks; several are on lines of their own."""
    return CallsRule(open, forced.calls(f"{call} {lark.mark(close)}", f'"\\n" {lark.mark(open)}'))
