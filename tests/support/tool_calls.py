"""Answers with calls, read whole or in pieces, and what each says."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from api.answers.answer import Reading as Terms
from api.answers.call_formats import CallFormat, ReasoningFormat
from api.answers.chat_answer import ChoiceParser
from api.answers.scanner import CallArguments, CallStart, ContentDelta, Delta, ReasoningDelta, Tool


@dataclass
class Answer:
    """What an answer's deltas say together."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        match delta:
            case ContentDelta(text):
                self.content += text
            case ReasoningDelta(text):
                self.reasoning += text
            case CallStart(index, name):
                assert index == len(self.calls)
                self.calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(self.calls) - 1
                name, arguments = self.calls[index]
                self.calls[index] = (name, arguments + text)


@dataclass(frozen=True)
class Reading:
    """How answers are read."""

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    tools: Sequence[Tool] = ()
    prompt: str = ""

    def deltas(self, pieces: Iterable[str]) -> list[list[Delta]]:
        """The deltas of each piece, and those of the end."""
        calls, reasoning = (form.name if form else "" for form in (self.calls, self.reasoning))
        tools = [(tool.name, json.dumps(tool.parameters)) for tool in self.tools]
        parser = ChoiceParser(Terms(calls, reasoning, self.prompt, tools), "r")
        return [*(parser.read(piece, 1, False) for piece in pieces), parser.read("", 0, True)]

    def read(self, *pieces: str) -> Answer:
        answer = Answer()
        for delta in chain(*self.deltas(pieces)):
            answer.add(delta)
        return answer


def cuts(text: str) -> Iterator[list[str]]:
    """The text in two pieces, cut at each place; then in single characters."""
    for i in range(1, len(text)):
        yield [text[:i], text[i:]]
    yield list(text)


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"enum": ["c", "f"]},
        "when": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "places": {"$ref": "#/$defs/places"},
        "exact": {"type": "boolean"},
    },
    "$defs": {"places": {"type": "array", "items": {"type": "string"}}},
}
TOOLS = (Tool("weather", SCHEMA), Tool("now", {"type": "object", "properties": {}}))


def check(reading: Reading, golden: Mapping[str, Answer]) -> None:
    """Every cut of each text says the same."""
    for text, answer in golden.items():
        assert reading.read(text) == answer, text
        for pieces in cuts(text):
            assert reading.read(*pieces) == answer, pieces
