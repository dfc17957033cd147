"""Typed events: streams of the Responses and the Messages API build an object, event by event. The object of
the Responses API, its items and its events.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import orjson

from api.answers.answer import HttpAnswer
from api.answers.logprobs import chat_logprobs
from api.answers.scanner import CallArguments, CallStart, ContentDelta, Delta, ReasoningDelta, is_json_text
from api.errors import failed
from api.http.openapi import Shape
from api.http.sse import Feed
from api.json import to_json
from api.protocols.openai import Choice, ChunkFeed, ChunkRenderer, new_parser
from api.protocols.protocol import WholeBody
from api.streams.stream import Stream
from common.messages.events import Terminal

Event = dict[str, Any]
"""An event of a stream, without its sequence number."""


Logprobs = list[dict[str, Any]]


class OutputPart(ABC):
    """A part of the object while it is made.

    Attributes:
        kind: a text, reasoning or a call, by this API's word.
        index: its position in the object.
        call: of a call: its id, and the name of the function.
        text: so far; of a call, the JSON of its arguments.
    """

    def __init__(self, kind: str, request_id: str, index: int, call: tuple[str, str]) -> None:
        self.kind = kind
        self.request_id = request_id
        self.index = index
        self.call = call
        self.text = ""

    @abstractmethod
    def begin(self) -> list[Event]:
        """Its first events."""

    @abstractmethod
    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        """Add text."""

    @abstractmethod
    def finish(self, status: str) -> list[Event]:
        """End it. Returns its last events."""


class EventRenderer(ChunkRenderer):
    """Renders one answer, piece by piece. Its chunks are whole frames.

    Attributes:
        part: what the object is made of.
        kinds: kinds of deltas → the kinds of parts that they are added to.
        parts: so far; the last one may go on.
        parser: finds reasoning and calls in the text; None if all of it is content.
        has_sequence: whether each event has its number, counted from 0; then each frame has an id.
        ordinals: of the frames, counted from 1.
    """

    has_sequence = False
    part: type[Any]
    kinds: Mapping[type[Delta], str]

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        super().__init__(answer, streams)
        [self.stream], [self.choice] = streams, self.choices
        self.parts: list[Any] = []
        self.parser = new_parser(answer)
        self.ordinals = count(1)

    def frames(self) -> Feed:
        """The first ones are ready before the first token."""
        return ChunkFeed(self, bytes)

    def whole(self) -> WholeBody:
        return to_json(self.render_so_far()), self.stream.num_tokens

    def next_events(self) -> list[Event]:
        """Take the next piece. Returns its events, which may be none."""
        piece = self.choice.take_piece()
        if self.parser is not None:
            deltas = self.parser.read(piece.text, len(piece.tokens), self.choice.ended)
        else:  # none for a token that shows no text of its own
            deltas = [ContentDelta(piece.text)] if piece.text else []
        events = [event for delta in deltas for event in self.add(delta)]
        return [*events, *self.last_events()] if self.choice.ended else events

    def render_so_far(self) -> dict[str, Any]:
        """The object with all that its stream has."""
        while self.choice.has_piece:
            self.next_events()
        if self.choice.failed:
            self.failure_event()
        return self.render()

    def render_first_chunks(self) -> list[bytes]:
        return [*map(self.frame, self.first_events())]

    def render_next_chunks(self, choice: Choice) -> list[bytes]:
        return [*map(self.frame, self.next_events())]

    def render_failure(self, failure: Terminal) -> bytes:
        return self.frame(self.failure_event())

    def frame(self, event: Event) -> bytes:
        """The frame of an event: its type, its id if frames have ids, and its data."""
        ordinal = next(self.ordinals)
        body = event | {"sequence_number": ordinal - 1} if self.has_sequence else event
        own_id = b"id: %d\n" % ordinal if self.answer.numbered else b""
        return b"event: %b\n%bdata: %b\n\n" % (event["type"].encode(), own_id, to_json(body))

    @abstractmethod
    def first_events(self) -> list[Event]:
        """The events before the first token."""

    def add(self, delta: Delta) -> list[Event]:
        """Add a delta to the last part of the object if it is of its kind, else to a new one."""
        logprobs = self.new_logprobs()
        if isinstance(delta, CallStart):
            assert self.parser is not None
            return self.begin(self.kinds[CallArguments], (self.parser.call_id(delta.index), delta.name))
        kind = self.kinds[type(delta)]
        begun = [] if self.parts and self.parts[-1].kind == kind else self.begin(kind)
        return [*begun, *self.parts[-1].add(delta.text, logprobs)]

    def begin(self, kind: str, call: tuple[str, str] = ("", "")) -> list[Event]:
        """Begin a part, and end the one before it."""
        ended = self.parts[-1].finish("completed") if self.parts else []
        self.parts.append(self.part(kind, self.answer.request_id, len(self.parts), call))
        return [*ended, *self.parts[-1].begin()]

    def new_logprobs(self) -> Logprobs:
        """Log-probabilities of the tokens since the last delta, where the object has them."""
        return []

    @abstractmethod
    def last_events(self) -> list[Event]:
        """The events after the last piece."""

    @abstractmethod
    def failure_event(self) -> Event:
        """The last event of an answer that failed."""

    @abstractmethod
    def render(self) -> dict[str, Any]:
        """The object as it is now."""


# --- as /docs describes it ----------------------------------------------------------------------------------


ITEM = {
    "id": "msg_5f0f8c0e_0",
    "type": ("message", "function_call", "function_call_output", "reasoning"),
    ...: ...,
}
RESPONSE_SHAPE = Shape(
    "ResponseObject",
    {
        "id": "resp_5f0f8c0e",
        "object": "response",
        "created_at": 1764000000,
        "status": ("completed", "queued", "in_progress", "incomplete", "failed", "cancelled"),
        "error": (None, {"code": "server_error", "message": "Request failed during generation"}),
        "incomplete_details": (None, {"reason": "max_output_tokens"}),
        "model": "SmolLM2",
        "output": [ITEM],
        "usage": (
            {
                "input_tokens": 12,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": 20,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 32,
            },
            None,
        ),
        "metadata": {},
        "tools": [{}],
        "tool_choice": ("auto", {}),
        "parallel_tool_calls": True,
        ...: ...,
    },
)
RESPONSE_EVENT = Shape(
    "ResponseEvent", {"type": "response.output_text.delta", "sequence_number": 4, ...: ...}
)

Item = dict[str, Any]


class ItemForm(NamedTuple):
    """A kind of items.

    Attributes:
        id_prefix: of its items.
        texts, parts: what events call its text, and its part; a call has no part.
        part_type: of its part.
        place: where events say that its part is.
    """

    id_prefix: str
    texts: str
    parts: str = ""
    part_type: str = ""
    place: Mapping[str, int] = {}


MESSAGE, CALL = "message", "function_call"
FORMS = {
    MESSAGE: ItemForm("msg", "output_text", "content_part", "output_text", {"content_index": 0}),
    "reasoning": ItemForm("rs", "reasoning_text", "content_part", "reasoning_text", {"content_index": 0}),
    "summary": ItemForm(
        "rs", "reasoning_summary_text", "reasoning_summary_part", "summary_text", {"summary_index": 0}
    ),
    CALL: ItemForm("fc", "function_call_arguments"),
}
"""Kinds of items: the answer's text; reasoning, and reasoning as its own summary, where the client asked for
one; a call of a function, whose text is the arguments in JSON.
"""


class OutputItem(OutputPart):
    """An item while it is made.

    Attributes:
        logprobs: of a message.
        status: `in_progress`, `completed` or `incomplete`.
        begun: whether it has its part.
    """

    def __init__(self, kind: str, request_id: str, index: int, call: tuple[str, str]) -> None:
        super().__init__(kind, request_id, index, call)
        self.form = FORMS[kind]
        self.id = item_id(self.form.id_prefix, request_id, index)
        self.logprobs: Logprobs = []
        self.status = "in_progress"
        self.begun = False

    def begin(self) -> list[Event]:
        added = self.whole_event("added")
        self.begun = bool(self.form.parts)
        return [added, self.part_event("added")] if self.begun else [added]

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        self.text += text
        self.logprobs += logprobs
        return [self.event("delta", delta=text) | self.shown(logprobs)]

    def finish(self, status: str) -> list[Event]:
        """The arguments of an incomplete call are never done: clients would run the call."""
        is_cut = self.kind == CALL and not is_json_text(self.text)
        self.status = "incomplete" if is_cut else status
        done: list[Event] = []
        if self.kind != CALL:
            text = self.event("done", text=self.text) | self.shown(self.logprobs)
            done = [text, self.part_event("done")]
        elif self.status == "completed":
            done = [self.event("done", name=self.call[1], arguments=self.text)]
        return [*done, self.whole_event("done")]

    def shown(self, logprobs: Logprobs) -> dict[str, Any]:
        return {"logprobs": logprobs} if self.kind == MESSAGE else {}

    def whole_event(self, what: str) -> Event:
        return {
            "type": f"response.output_item.{what}",
            "output_index": self.index,
            "item": self.render(),
        }

    def event(self, what: str, **more: Any) -> Event:
        kind = f"response.{self.form.texts}.{what}"
        return {"type": kind, "item_id": self.id, "output_index": self.index, **self.form.place, **more}

    def part_event(self, what: str) -> Event:
        return self.event(what, part=self.part()) | {"type": f"response.{self.form.parts}.{what}"}

    def part(self) -> dict[str, Any]:
        of_message = {"annotations": [], "logprobs": [*self.logprobs]} if self.kind == MESSAGE else {}
        return {"type": self.form.part_type, **of_message, "text": self.text}

    def render(self) -> Item:
        """The item as it is now."""
        head = {"id": self.id, "type": self.kind, "status": self.status}
        parts = [self.part()] if self.begun else []
        match self.kind:
            case "message":
                return head | {"content": parts, "role": "assistant"}
            case "function_call":
                call_id, name = self.call
                return head | {"arguments": self.text, "call_id": call_id, "name": name}
        field = "content" if self.kind == "reasoning" else "summary"
        own = {"summary": [], "content": [], field: parts}
        return head | {"type": "reasoning", **own, "encrypted_content": None}


def item_id(prefix: str, request_id: str, position: int | str) -> str:
    """Id of an item; its position is a number in the output, or `i` and a number in the input."""
    return f"{prefix}_{request_id}_{position}"


# --- the response -------------------------------------------------------------------------------------------


ENDS = {"completed": "response.completed", "incomplete": "response.incomplete"}
"""Last events by status; any other end is a failure."""
SUPERSEDED = "superseded"
"""Error type of a stream that another reader has taken."""
SHOWN_TIERS = {"interactive": "priority", "standard": "default", "batch": "flex"}
"""Classes → the service tiers that a response shows."""
ERROR_CODES = {408: "timeout", 424: "server_error"}
"""`error.code` of a response that failed, by the status of its error; others are faults of the request."""


def response_id(request_id: str) -> str:
    return f"resp_{request_id}"


def fields_of(answer: HttpAnswer) -> Any:
    """The fields of the object that say what was requested: `store` and `background` among them."""
    assert answer.response is not None
    return orjson.loads(answer.response.fields)


class ResponseObjectRenderer(EventRenderer):
    """Renders one response, piece by piece.

    Attributes:
        fields: as of `fields_of`.
        num_shown: tokens whose log-probabilities were shown; others have not shown any text yet.
    """

    has_sequence = queues = True
    part = OutputItem

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        super().__init__(answer, streams)
        self.fields = fields_of(answer)
        reasoning = "summary" if self.fields["reasoning"]["summary"] else "reasoning"
        self.kinds = {ContentDelta: MESSAGE, ReasoningDelta: reasoning, CallArguments: CALL}
        self.num_shown = 0

    # --- events ---------------------------------------------------------------------------------------------

    def first_events(self) -> list[Event]:
        status = "queued" if self.fields["background"] else "in_progress"
        kinds = ["created", "queued"] if self.fields["background"] else ["created"]
        first = [{"type": f"response.{kind}", "response": self.render(status)} for kind in kinds]
        return [*first, {"type": "response.in_progress", "response": self.render("in_progress")}]

    def new_logprobs(self) -> Logprobs:
        begin, self.num_shown = self.num_shown, self.choice.text.num_tokens
        has_logprobs = self.answer.rendering.logprobs
        return chat_logprobs(self.stream, range(begin, self.num_shown)) if has_logprobs else []

    def last_events(self) -> list[Event]:
        """The end of the last item, an empty message if there is none, and that of the response."""
        opened = [] if self.parts else self.begin(MESSAGE)
        ended = self.parts[-1].finish("completed" if self.status == "completed" else "incomplete")
        return [*opened, *ended, {"type": ENDS[self.status], "response": self.render()}]

    def failure_event(self) -> Event:
        assert self.stream.terminal is not None
        if self.stream.terminal.error_type == SUPERSEDED:
            return {"type": "error", "code": SUPERSEDED, "message": self.stream.terminal.error, "param": None}
        if self.parts:
            self.parts[-1].status = "incomplete"
        return {"type": "response.failed", "response": self.render()}

    # --- the object -----------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        terminal = self.stream.terminal
        if terminal is None:
            return "in_progress" if self.stream.ids or self.stream.worker else "queued"
        if self.stream.finished:
            ends_in_call = self.parser is not None and self.parser.ends_in_call
            # complete although it ends at `max_output_tokens`: with a call, or as a whole JSON
            is_whole = self.choice.ended and (self.choice.is_whole_json or ends_in_call)
            is_cut = self.is_within_call or (terminal.known_reason == "length" and not is_whole)
            return "incomplete" if is_cut else "completed"
        return "cancelled" if terminal.reason == "cancelled" else "failed"

    @property
    def is_within_call(self) -> bool:
        """Whether it ends within a call, as at a stop string."""
        return self.choice.ended and self.parser is not None and self.parser.is_within_call

    def queued(self) -> bytes:
        return to_json(self.render("queued"))

    def render(self, status: str = "") -> dict[str, Any]:
        """The response as it is now, or as it would be in another status."""
        status = status or self.status
        terminal = self.stream.terminal
        is_cut = status == "incomplete" and terminal is not None and terminal.known_reason == "length"
        incomplete = {"reason": "max_output_tokens"} if is_cut else None
        error = None
        if status == "failed" and terminal is not None:
            cause = failed(terminal)
            code = ERROR_CODES.get(cause.status, "invalid_prompt")
            error = {"code": code, "message": cause.text}
        return {
            "id": response_id(self.answer.request_id),
            "object": "response",
            "created_at": self.answer.created_s,
            "status": status,
            "error": error,
            "incomplete_details": incomplete,
            "model": self.answer.model,
            "output": [item.render() for item in self.parts],
            **self.fields,
            "service_tier": SHOWN_TIERS[self.answer.requests[0].class_name],
            "usage": self.usage() if status in ENDS else None,
        }

    def usage(self) -> dict[str, Any]:
        """Token counts; of the generated tokens, only those that were taken."""
        parser, num_reasoning = self.parser, 0
        if parser is not None and parser.reading.reasoning:
            num_reasoning = parser.num_reasoning_tokens
        num_input, num_output = self.answer.num_prompt_tokens, self.choice.text.num_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": self.stream.num_cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_input + num_output,
        }
