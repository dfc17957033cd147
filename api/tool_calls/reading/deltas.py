"""Deltas: what an answer's text says, as it comes: content, reasoning, and calls of tools."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: the JSON schema of its arguments, an object's.
        strict: its calls are forced to match the schema.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = ContentDelta | ReasoningDelta | CallStart | CallArguments


def joined(last: Delta, delta: Delta) -> Delta | None:
    """Both deltas as one, if they continue each other."""
    match last, delta:
        case ContentDelta(), ContentDelta():
            return ContentDelta(last.text + delta.text)
        case ReasoningDelta(), ReasoningDelta():
            return ReasoningDelta(last.text + delta.text)
        case CallArguments(), CallArguments() if last.index == delta.index:
            return CallArguments(last.index, last.text + delta.text)
        case _:
            return None
