"""Call formats: the ways in which models write calls, by the names of vLLM's `--tool-call-parser`."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from api.tool_calls.formats.hermes import read_hermes
from api.tool_calls.reading.deltas import Tool
from api.tool_calls.reading.reader import Reader

Read = Callable[[Reader, Sequence[Tool]], Generator[None, None, None]]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls.

    Attributes:
        name: vLLM's name of its parser.
        marks: texts in which calls begin, end, or are divided. Where one is a special token of the model, its
            text must be among what the parser is fed.
        read: the generator that reads an answer.
    """

    name: str
    marks: tuple[str, ...]
    read: Read


HERMES = CallFormat("hermes", ("<tool_call>", "</tool_call>"), read_hermes)
CALL_FORMATS = {"hermes": HERMES}
