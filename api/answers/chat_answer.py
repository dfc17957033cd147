"""Chat answer: the text of one choice, read piece by piece as content, reasoning and calls, and OpenAI's
objects of these.

It is a function of the answer's `Reading` and of the text, however that is cut: every gateway reads the same.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from api.answers.answer import Reading
from api.answers.call_formats import CALL_FORMATS, REASONING_FORMATS
from api.answers.call_readers import read_calls, read_reasoning
from api.answers.scanner import (
    CallArguments,
    CallStart,
    ContentDelta,
    Delta,
    ReasoningDelta,
    Scan,
    Scanner,
    Tool,
    is_json_text,
)

ID_CHARS = 24
SHORT_ID_CHARS = 9
"""Characters of a call's id, where the model's template takes short ones."""


def read_answer(scanner: Scanner, reading: Reading) -> Scan:
    """Read reasoning first, where the model thinks, then content and calls."""
    calls, reasoning = CALL_FORMATS.get(reading.calls), REASONING_FORMATS.get(reading.reasoning)
    if reasoning is not None:
        yield from read_reasoning(scanner, reasoning, reasoning.begins_inside(reading.prompt_end))
    if calls is not None:
        yield from read_calls(calls, scanner)
    else:
        yield from scanner.content_until()
    if scanner.space:  # white space at the end is content
        scanner.emit(ContentDelta(scanner.space))


class ChoiceParser:
    """Parses the text of one choice.

    Attributes:
        name: of the choice among all that were ever requested; ids of calls follow from it.
        num_tokens: tokens read.
        num_reasoning_tokens: those of them that came before content and calls, if there is reasoning.
        last_call: the arguments of the last call so far.
        goes_on: text follows the last call.
    """

    def __init__(self, reading: Reading, name: str) -> None:
        self.reading = reading
        self.name = name
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.reasons = False
        self.answers = False
        self.last_call = ""
        self.goes_on = False
        tools = [Tool(tool, json.loads(schema)) for tool, schema in reading.tools]
        self.scanner = Scanner(tools, reading.is_either)
        self.reader = read_answer(self.scanner, reading)

    def read(self, text: str, num_tokens: int, ended: bool) -> list[Delta]:
        """What the next piece of text says; the last one ends the answer. Marks of the formats are part of
        it, special tokens or not.
        """
        self.scanner.text += text
        self.scanner.ended = ended
        next(self.reader, None)
        deltas, self.scanner.deltas = self.scanner.deltas, []
        self.reasons |= any(isinstance(one, ReasoningDelta) for one in deltas)
        self.answers |= any(not isinstance(one, ReasoningDelta) for one in deltas)
        self.num_tokens += num_tokens
        if self.reasons and not self.answers:
            self.num_reasoning_tokens = self.num_tokens
        shown = [one for one in deltas if self.is_shown(one)]
        self.note_calls(shown)
        return shown

    def note_calls(self, deltas: Iterable[Delta]) -> None:
        for one in deltas:
            match one:
                case CallStart():
                    self.last_call, self.goes_on = "", False
                case CallArguments(_, text):
                    self.last_call += text
                case ContentDelta(text):
                    self.goes_on |= bool(text.strip())

    def is_shown(self, delta: Delta) -> bool:
        match delta:
            case ReasoningDelta():
                return self.reading.shows_reasoning
            case CallStart() | CallArguments():
                return self.reading.parallel or delta.index == 0
            case _:
                return True

    @property
    def has_calls(self) -> bool:
        return self.scanner.num_calls > 0

    @property
    def is_within_call(self) -> bool:
        """Whether the last call is not complete: a client must not do what it says."""
        return self.has_calls and not is_json_text(self.last_call)

    def finish_reason(self, reason: str) -> str:
        """OpenAI's reason for the end of an answer; `reason` is that of a text, which may end within a call.
        One that ends by `max_tokens` after a complete call, and nothing after that, has lost nothing.
        """
        is_over = reason == "stop" or (reason == "length" and not self.goes_on)
        return "tool_calls" if is_over and self.has_calls and not self.is_within_call else reason

    def call_id(self, index: int) -> str:
        """The id of a call: every gateway gives it the same one, and no other call has it."""
        digest = hashlib.sha256(f"{self.name}/{index}".encode()).hexdigest()
        form = CALL_FORMATS.get(self.reading.calls)
        return digest[:SHORT_ID_CHARS] if form and form.short_ids else f"call_{digest[:ID_CHARS]}"


def marks_of(reading: Reading) -> tuple[str, ...]:
    """Texts that divide an answer into its parts."""
    calls, reasoning = CALL_FORMATS.get(reading.calls), REASONING_FORMATS.get(reading.reasoning)
    return (*(calls.marks if calls else ()), *(reasoning.marks if reasoning else ()))


# --- OpenAI's objects ---------------------------------------------------------------------------------------


def render_message(parser: ChoiceParser, deltas: Iterable[Delta], prefix: str = "") -> dict[str, Any]:
    """The fields of the message that all deltas make, without its role. Its content begins with `prefix`."""
    content, reasoning = prefix, ""
    calls: list[dict[str, Any]] = []
    for one in deltas:
        match one:
            case ContentDelta(text):
                content += text
            case ReasoningDelta(text):
                reasoning += text
            case CallStart(index, name):
                calls.append(new_call(parser, index, name))
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    message: dict[str, Any] = {"content": content if content or not calls else None}
    if reasoning:
        message |= render_reasoning(reasoning)
    if calls and parser.reading.is_older:
        message["function_call"] = calls[0]["function"]
    elif calls:
        message["tool_calls"] = calls
    return message


def new_call(parser: ChoiceParser, index: int, name: str) -> dict[str, Any]:
    return {"id": parser.call_id(index), "type": "function", "function": {"name": name, "arguments": ""}}


def render_reasoning(text: str) -> dict[str, str]:
    """The fields of reasoning: older clients look for the first name, newer ones for the second."""
    return {"reasoning_content": text, "reasoning": text}


def render_deltas(parser: ChoiceParser, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    """The fields `delta` of the chunks of one piece: a call's name comes in a chunk before its arguments."""
    chunks: list[dict[str, Any]] = []
    for one in deltas:
        match one:
            case ContentDelta(text):
                chunks.append({"content": text})
            case ReasoningDelta(text):
                chunks.append(render_reasoning(text))
            case CallStart(index, name):
                chunks.append(render_call_delta(parser, index, new_call(parser, index, name)))
            case CallArguments(index, text):
                chunks.append(render_call_delta(parser, index, {"function": {"arguments": text}}))
    return chunks


def render_call_delta(parser: ChoiceParser, index: int, call: dict[str, Any]) -> dict[str, Any]:
    if parser.reading.is_older:
        return {"function_call": call["function"]}
    return {"tool_calls": [{"index": index, **call}]}


def is_whole_json(text: str) -> bool:
    """Whether a text is JSON that nothing but white space may follow, as digits may a number."""
    return text.rstrip().endswith(("}", "]", '"')) and is_json_text(text)
