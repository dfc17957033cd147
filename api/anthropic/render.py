"""Message: the object of Anthropic's Messages API and its events, whole or in frames. They depend on the
answer and its tokens alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from pydantic_core import from_json

from api.answers.answer import HttpAnswer
from api.answers.scanner import CallArguments, CallStart, ContentDelta, Delta, ReasoningDelta
from api.errors import anthropic, failed
from api.http.sse import MAX_ITEMS, Feed
from api.json import to_json
from api.openai.choice import new_choices, new_parser, read_piece
from api.requests.respond import AnswerRenderer, total_headers
from api.streams.http_response import Whole
from api.streams.stream import Stream

Event = dict[str, Any]
TIERS = {"interactive": "priority", "standard": "standard", "batch": "batch"}
"""Classes → the service tiers that a message shows."""


@dataclass(slots=True)
class OutputBlock:
    """A block of a message while it is made.

    Attributes:
        kind: `text`, `thinking` or `tool_use`.
        text: so far; of a call, the JSON of its arguments.
        name, id: of a call.
        signature: of reasoning. Anthropic's clients send back only reasoning that has one.
    """

    kind: str
    text: str = ""
    name: str = ""
    id: str = ""
    signature: str = ""

    def start(self) -> dict[str, Any]:
        """The block before its first delta."""
        match self.kind:
            case "text":
                return {"type": "text", "text": ""}
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case _:
                return {"type": "tool_use", "id": self.id, "name": self.name, "input": {}}

    def delta(self, text: str) -> dict[str, Any]:
        match self.kind:
            case "text":
                return {"type": "text_delta", "text": text}
            case "thinking":
                return {"type": "thinking_delta", "thinking": text}
            case _:
                return {"type": "input_json_delta", "partial_json": text}

    def render(self) -> dict[str, Any]:
        """The whole block. Arguments that were cut have what is complete in them."""
        match self.kind:
            case "text":
                return self.start() | {"text": self.text}
            case "thinking":
                return self.start() | {"thinking": self.text, "signature": self.signature}
            case _:
                return self.start() | {"input": parse_input(self.text)}


def parse_input(text: str) -> Any:
    """The arguments of a call, as Anthropic's own client reads those of a stream."""
    try:
        return from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}


class MessageRenderer:
    """Renders one message, piece by piece.

    Attributes:
        parser: finds reasoning and calls in the text; None if all of it is content.
        blocks: the last one may go on.
        ended: whether everything was taken.
    """

    def __init__(self, answer: HttpAnswer, stream: Stream) -> None:
        self.answer = answer
        self.stream = stream
        [self.choice] = new_choices(answer, [stream])
        self.parser = new_parser(answer)
        self.blocks: list[OutputBlock] = []
        self.ended = False

    # --- events ---------------------------------------------------------------------------------------------

    def first_events(self) -> list[Event]:
        """The events before the first token."""
        return [{"type": "message_start", "message": self.render()}, {"type": "ping"}]

    @property
    def has_more(self) -> bool:
        """Whether there is a piece, or an end, to take."""
        return not self.ended and (self.choice.has_piece or self.choice.failed)

    def next_events(self) -> list[Event]:
        """Take the next piece, or the end. Returns its events, which may be none."""
        if not self.choice.has_piece:
            self.ended = True
            assert self.stream.terminal is not None
            return [anthropic(failed(self.stream.terminal))[1]]
        piece = self.choice.take_piece()
        deltas = read_piece(self.parser, piece, self.choice.ended)
        events = [event for delta in deltas for event in self.add(delta)]
        if self.choice.ended:
            self.ended = True
            events += [*self.stop_block(), *self.last_events()]
        return events

    def add(self, delta: Delta) -> list[Event]:
        """Add a delta to the last block if it is of its kind, else to a new one."""
        match delta:
            case CallStart(index, name):
                assert self.parser is not None
                return self.start_block(OutputBlock("tool_use", name=name, id=self.parser.call_id(index)))
            case CallArguments(_, text):
                return self.extend("tool_use", text)
            case ContentDelta(text):
                return self.extend("text", text)
            case ReasoningDelta(text):
                return self.extend("thinking", text)

    def extend(self, kind: str, text: str) -> list[Event]:
        is_new = not self.blocks or self.blocks[-1].kind != kind
        events = self.start_block(OutputBlock(kind)) if is_new else []
        self.blocks[-1].text += text
        return [*events, self.delta_event(self.blocks[-1].delta(text))] if text else events

    def start_block(self, block: OutputBlock) -> list[Event]:
        """Start a block, and stop the one before it."""
        stopped = self.stop_block()
        self.blocks.append(block)
        return [*stopped, self.block_event("content_block_start", content_block=block.start())]

    def stop_block(self) -> list[Event]:
        """Stop the last block, if there is one."""
        if not self.blocks:
            return []
        signed: list[Event] = []
        if self.blocks[-1].kind == "thinking":
            self.blocks[-1].signature = f"{self.answer.request_id}.{len(self.blocks) - 1}"
            signature = {"type": "signature_delta", "signature": self.blocks[-1].signature}
            signed = [self.delta_event(signature)]
        return [*signed, self.block_event("content_block_stop")]

    def delta_event(self, delta: dict[str, Any]) -> Event:
        return self.block_event("content_block_delta", delta=delta)

    def block_event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "index": len(self.blocks) - 1, **more}

    def last_events(self) -> list[Event]:
        return [
            {"type": "message_delta", "delta": self.ending(), "usage": self.usage()},
            {"type": "message_stop"},
        ]

    # --- the object -----------------------------------------------------------------------------------------

    def render_so_far(self) -> dict[str, Any]:
        """The message with all that its stream has."""
        while self.has_more:
            self.next_events()
        return self.render()

    def render(self) -> dict[str, Any]:
        """The message as it is now."""
        return {
            "id": f"msg_{self.answer.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.answer.model,
            "content": [block.render() for block in self.blocks],
            **self.ending(),
            "usage": self.usage(),
        }

    def ending(self) -> dict[str, Any]:
        """Why the message has ended; null until then."""
        reason = self.stop_reason()
        stop = self.choice.text.stop_reason if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop}

    def stop_reason(self) -> str | None:
        reason, parser = self.choice.finish_reason, self.parser
        if reason is None:
            return None
        is_within_call = parser is not None and parser.is_within_call
        calls = parser is not None and parser.has_calls and (reason == "stop" or parser.ends_in_call)
        if calls and not is_within_call:
            return "tool_use"
        if isinstance(self.choice.text.stop_reason, str):
            return "stop_sequence"
        return "max_tokens" if reason == "length" or is_within_call else "end_turn"

    def usage(self) -> dict[str, Any]:
        """Token counts; of the generated tokens, only those that were taken. Before the first of them nobody
        knows what was cached, so a stream that is rendered again does not say it there either.
        """
        has_begun = self.ended or self.choice.text.num_tokens
        num_cached = self.stream.num_cached if has_begun else 0
        return {
            "input_tokens": self.answer.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self.choice.text.num_tokens,
            "service_tier": TIERS[self.answer.requests[0].class_name],
        }


class MessageFrames(Feed[bytes]):
    """All frames of a message; the first ones are ready before the first token."""

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        [stream] = streams
        super().__init__(stream.changed)
        self.renderer = MessageRenderer(answer, stream)
        self.first = self.renderer.first_events()
        self.ordinals = count(1) if answer.numbered else None

    def take(self) -> list[bytes]:
        events, self.first = self.first, []
        while self.renderer.has_more and len(events) < MAX_ITEMS:
            events += self.renderer.next_events()
        self.ended = self.renderer.ended
        return [self.frame(event) for event in events]

    def frame(self, event: Event) -> bytes:
        """The frame of an event: its type, its id if frames are numbered, and its data."""
        numbered = b"" if self.ordinals is None else b"id: %d\n" % next(self.ordinals)
        return b"event: %b\n%bdata: %b\n\n" % (event["type"].encode(), numbered, to_json(event))


def render_whole(answer: HttpAnswer, streams: Sequence[Stream], arrived_s: float) -> Whole:
    [stream] = streams
    body = to_json(MessageRenderer(answer, stream).render_so_far())
    return body, total_headers(answer, streams, stream.num_tokens, arrived_s)


RENDERER = AnswerRenderer(MessageFrames, render_whole)
