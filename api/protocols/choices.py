"""Choices: how much of each was taken, and their chunks in turns; and answers that are built event by event,
the objects of the Responses and the Messages API.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, count
from typing import Any, NamedTuple

from api.answers.answer import HttpAnswer, Rendering
from api.answers.chat_answer import ChoiceParser, is_whole_json, marks_of, render_message
from api.answers.scanner import CallArguments, CallStart, ContentDelta, Delta, end_of_certain
from api.errors import INSUFFICIENT_QUOTA, Family, failed, openai
from api.event_loop import offload
from api.http.sse import MAX_ITEMS, Change, Feed
from api.json import to_json
from api.protocols.protocol import Renderer, WholeBody
from api.streams.stream import Stream, all_outputs
from common.messages.events import BUDGET, Terminal

FINISH_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


class TextPiece(NamedTuple):
    """A piece of a choice's text, sent in one chunk.

    Attributes:
        text: new text that may be shown; text that may become a stop string waits for a later piece.
        tokens: indices of the tokens that the chunk reports.
        deltas: what a parser finds in the text.
    """

    text: str
    tokens: range
    deltas: Sequence[Delta] = ()


class Choice:
    """A choice: a stream, and how much of it was taken. All pieces of its text are the whole, without hidden
    tokens and stop strings; what may become a part of a stop string is held back until that is known.

    Stop strings are found as the worker's `StopMatcher` finds them: not in the first `min_new_tokens` tokens,
    and special tokens count as their literal text.

    Attributes:
        prefix: text that is sent before the generated text (`echo`).
        parser: finds reasoning and calls in the text; None if all of it is content.
        hidden_ids: tokens that are no part of the text.
        num_tokens: number of tokens taken.
        num_chars: number of characters of the tokens taken, free or held back.
        held: text of the tokens taken that is not free yet.
        shown: whether each character of it is visible.
        stop_reason: the stop string or token id that ended the text, or `insufficient_quota`; set by `last`.
        offsets: for each token taken, the number of characters before it.
        begun: whether the first piece, or a chunk before it, was taken.
        ended: whether everything was taken.
    """

    def __init__(
        self, index: int, stream: Stream, prefix: str, rendering: Rendering, answer_id: str = ""
    ) -> None:
        self.index = index
        self.stream = stream
        self.prefix = prefix
        self.rendering = rendering
        self.parser = ChoiceParser(rendering.reading, f"{answer_id}.{index}") if rendering.reading else None
        self.hidden_ids = hidden_ids(rendering, stream)
        self.num_tokens = 0
        self.num_chars = 0
        self.held = ""
        self.shown: list[bool] = []
        self.stop_reason: str | int | None = None
        self.offsets: list[int] = []
        self.begun = False
        self.ended = False

    @property
    def failed(self) -> bool:
        return self.stream.terminal is not None and not self.stream.finished

    @property
    def has_piece(self) -> bool:
        """Whether a token can be taken now, or the end; the last token of a finished choice comes with it."""
        if self.num_tokens < self.stream.num_ready and not self.rendering.prompt_only:
            return True
        return not self.ended and self.stream.finished

    def take_piece(self) -> TextPiece:
        """The next piece of a choice that has one: one token, or the end of a finished choice."""
        self.begun = True
        if self.rendering.prompt_only:
            self.ended = True
            return TextPiece("", range(0))
        if self.stream.terminal is None or self.num_tokens < self.stream.num_ready:
            return self.piece(1)
        self.ended = True
        return self.piece(self.stream.num_tokens - self.num_tokens)

    def piece(self, num_tokens: int) -> TextPiece:
        begin = self.num_tokens
        self.offsets += [len(self.prefix) + self.num_chars] * num_tokens
        text = self.last() if self.ended else self.step()
        deltas = self.parser.read(text, num_tokens, self.ended) if self.parser else ()
        return TextPiece(text, range(begin, begin + num_tokens), deltas)

    def take_all(self) -> TextPiece:
        """All pieces of a finished choice as one."""
        pieces = []
        while not self.ended:
            pieces.append(Choice.take_piece(self))
        text, deltas = "".join(one.text for one in pieces), [delta for one in pieces for delta in one.deltas]
        return TextPiece(text, range(self.num_tokens), deltas)

    def step(self) -> str:
        """Take one token, which is not the last, and return the text that is free now."""
        text, is_shown = self.take_token()
        stopping = self.stream.request.stopping
        if not stopping.stop or self.num_tokens <= stopping.min_new_tokens:
            return text if is_shown else ""
        self.hold(text, is_shown)
        return self.free(end_of_certain(self.held, stopping.stop, 0))

    def last(self) -> str:
        """Take the last token, unless it was taken before, and return the rest of the text."""
        assert self.stream.terminal is not None
        reason, num_held = self.stream.terminal.reason, len(self.held)
        fresh = self.num_tokens < self.stream.num_tokens
        if fresh:
            self.hold(*self.take_token())
        stops = self.stream.request.stopping.stop if reason == "stop_sequence" else []
        stop = find_first_stop(self.held, stops)
        if stop is not None:
            begin, self.stop_reason = stop
            return self.free(begin + self.rendering.include_stop * len(self.stop_reason))
        if reason == "stop_sequence":
            self.stop_reason = self.stream.ids[-1]
        if reason == BUDGET:
            self.stop_reason = INSUFFICIENT_QUOTA
        is_end = self.stream.terminal.known_reason != "length" and fresh  # its text is a mark
        return self.free(num_held if is_end and not self.rendering.include_stop else len(self.held))

    def take_token(self) -> tuple[str, bool]:
        """The text of the next token, and whether it is visible."""
        i = self.num_tokens
        text, is_shown = self.stream.texts[i], self.stream.ids[i] not in self.hidden_ids
        self.num_tokens += 1
        self.num_chars += len(text) if is_shown else 0
        return text, is_shown

    def hold(self, text: str, is_shown: bool) -> None:
        self.held += text
        self.shown += [is_shown] * len(text)

    def free(self, end: int) -> str:
        """Remove the held text up to this place; return what of it is visible."""
        text = "".join(compress(self.held[:end], self.shown))
        self.held, self.shown = self.held[end:], self.shown[end:]
        return text

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word for the end of the answer; None until it ends. A complete JSON ends with `stop`, even
        at `max_tokens`.
        """
        if not self.ended or self.stream.terminal is None:
            return None
        reason = FINISH_REASONS[self.stream.terminal.known_reason]
        reason = "stop" if reason == "length" and self.is_whole_json else reason
        return self.parser.finish_reason(reason) if self.parser else reason

    @property
    def is_within_call(self) -> bool:
        """Whether it ends within a call, as at a stop string."""
        return self.ended and self.parser is not None and self.parser.is_within_call

    @property
    def is_whole_json(self) -> bool:
        """Whether the client asked for JSON, and the content so far is a complete one."""
        if not self.rendering.is_json:
            return False
        reading, pairs = self.rendering.reading, zip(self.stream.ids, self.stream.texts, strict=False)
        content = "".join(text for token, text in pairs if token not in self.hidden_ids)
        if reading is not None:
            parser = ChoiceParser(reading, "")
            content = render_message(parser, parser.read(content, 0, ended=True))["content"] or ""
        return is_whole_json(content)


class SequenceChoice(Choice):
    """A sequence of a beam search: its whole text is one piece."""

    @property
    def has_piece(self) -> bool:
        return self.stream.finished and not self.ended

    def take_piece(self) -> TextPiece:
        return self.take_all()


def hidden_ids(rendering: Rendering, stream: Stream) -> frozenset[int]:
    """Special tokens that the text leaves out: all but those that mark reasoning and calls in it."""
    if not rendering.skip_special:
        return frozenset()
    marks = marks_of(rendering.reading) if rendering.reading else ()
    shown = {stream.tokenizer.backend.token_to_id(mark) for mark in marks}
    return stream.tokenizer.special_ids - shown


def find_first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The offset of the stop string that is complete first, and that string."""
    found = [(begin + len(stop), begin, stop) for stop in stops if (begin := text.find(stop)) >= 0]
    return min(found)[1:] if found else None


# --- chunks -------------------------------------------------------------------------------------------------


class ChunkRenderer(Renderer):
    """Renders the choices of one answer in chunks: each once, in order. A chunk is its bytes, or an event.

    Attributes:
        error: the form of a chunk that says why a choice has failed.
        last_chunks: what comes after all of them.
    """

    error: Family = staticmethod(openai)
    last_chunks: Sequence[bytes] = [b"[DONE]"]

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        super().__init__(answer, streams)
        own = answer.rendering, answer.request_id
        self.choices = [
            (SequenceChoice if stream.request.beams else Choice)(i, stream, answer.prefix(i), *own)
            for i, stream in enumerate(all_outputs(streams))
        ]

    def frames(self) -> Feed:
        """A frame's id is its number, counted from 1."""
        if not self.answer.numbered:
            return ChunkFeed(self, lambda chunk: b"data: %b\n\n" % chunk, self.last_chunks)
        ids = count(1)
        return ChunkFeed(self, lambda one: b"id: %d\ndata: %b\n\n" % (next(ids), one), self.last_chunks)

    @abstractmethod
    def render_next_chunks(self, choice: Choice) -> list[Any]:
        """The next chunks of a choice that has a piece, which may be none."""

    def render_first_chunks(self) -> list[Any]:
        """The chunks before the first token."""
        return []

    def render_last_chunks(self) -> list[Any]:
        """The chunks after all choices have ended."""
        return []

    def render_failure(self, failure: Terminal) -> Any:
        """The chunk that says why a choice has failed."""
        return to_json(self.error(failed(failure))[1])

    def echoed_logprobs(self, choice: Choice) -> dict[str, list[Any]] | None:
        """Log-probabilities of the echoed prompt, if requested. The first call for a choice may be slow."""
        return None


class ChunkFeed(Feed):
    """Chunks of an answer, until all choices have ended or one has failed, and the `last` ones after them.

    Choices take turns, a piece each: the order of all chunks depends on the tokens alone.

    Args:
        shape: makes a frame of a chunk.
    """

    def __init__(
        self, renderer: ChunkRenderer, shape: Callable[[Any], bytes], last: Sequence[bytes] = ()
    ) -> None:
        super().__init__(Change())
        self.renderer = renderer
        self.shape = shape
        self.last = last
        self.turns = deque(renderer.choices)
        self.first = [*map(shape, renderer.render_first_chunks())]
        for choice in renderer.choices:
            choice.stream.changed = self.changed

    @property
    def is_prepared(self) -> bool:
        """Whether all log-probabilities of prompts are rendered."""
        return all(choice.begun or choice.stream.request.prompt_logprobs is None for choice in self.turns)

    async def prepare(self) -> None:
        for choice in self.turns:
            if choice.stream.num_tokens and not choice.begun:
                num_records = choice.stream.prompt.num_records
                await offload(num_records, partial(self.renderer.echoed_logprobs, choice))

    def take(self) -> list[bytes]:
        turns, render, shape = self.turns, self.renderer.render_next_chunks, self.shape
        new, self.first = self.first, []
        while turns and (choice := turns[0]).has_piece:
            new += map(shape, render(choice))
            turns.rotate(-1)
            if choice.ended:
                turns.pop()
            if len(new) >= MAX_ITEMS:
                return new
        failure = turns[0].stream.terminal if turns else None  # a finished choice has a piece: it failed
        if turns and failure is None:
            return new
        self.ended = True
        end = [self.renderer.render_failure(failure)] if failure else self.renderer.render_last_chunks()
        return [*new, *map(shape, (*end, *self.last))]


# --- events -------------------------------------------------------------------------------------------------


Event = dict[str, Any]
"""An event of a stream, without its sequence number."""
Logprobs = list[dict[str, Any]]


@dataclass(slots=True)
class Part:
    """A part of an object while it is made.

    Attributes:
        kind: a text, reasoning or a call, by this API's word.
        index: its position in the object.
        call: of a call: its id, and the name of the function.
        text: so far; of a call, the JSON of its arguments.
        logprobs: of its text, where the object has them.
        status: `in_progress`, `completed` or `incomplete`.
    """

    kind: str
    index: int
    call: tuple[str, str]
    text: str = ""
    logprobs: Logprobs = field(default_factory=list)
    status: str = "in_progress"


class EventRenderer(ChunkRenderer):
    """Renders one answer, piece by piece. Its chunks are events.

    Attributes:
        kinds: kinds of deltas → the kinds of parts that they are added to.
        parts: so far; the last one may go on.
        parser: as of the choice.
        has_sequence: whether each event has its number, counted from 0; then each frame has an id.
        ordinals: of the frames, counted from 1.
    """

    has_sequence = False
    kinds: Mapping[type[Delta], str]

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        super().__init__(answer, streams)
        [self.stream], [self.choice] = streams, self.choices
        self.parts: list[Part] = []
        self.parser = self.choice.parser
        self.ordinals = count(1)

    def frames(self) -> Feed:
        """The first ones are ready before the first token."""
        return ChunkFeed(self, self.frame)

    def frame(self, event: Event) -> bytes:
        """The frame of an event: its type, its id if frames have ids, and its data."""
        ordinal = next(self.ordinals)
        body = event | {"sequence_number": ordinal - 1} if self.has_sequence else event
        own_id = b"id: %d\n" % ordinal if self.answer.numbered else b""
        return b"event: %b\n%bdata: %b\n\n" % (event["type"].encode(), own_id, to_json(body))

    def whole(self) -> WholeBody:
        return to_json(self.render_so_far()), self.stream.num_tokens

    def render_so_far(self) -> dict[str, Any]:
        """The object with all that its stream has."""
        while self.choice.has_piece:
            self.render_next_chunks(self.choice)
        if self.choice.ended:
            self.render_last_chunks()
        elif self.choice.failed and self.stream.terminal is not None:
            self.render_failure(self.stream.terminal)
        return self.render()

    def render_next_chunks(self, choice: Choice) -> list[Event]:
        piece = choice.take_piece()
        content = [ContentDelta(piece.text)] if piece.text and self.parser is None else ()
        return [event for delta in (*content, *piece.deltas) for event in self.add(delta)]

    def add(self, delta: Delta) -> list[Event]:
        """Add a delta to the last part of the object if it is of its kind, else to a new one."""
        logprobs = self.new_logprobs()
        if isinstance(delta, CallStart):
            assert self.parser is not None
            return self.begin(self.kinds[CallArguments], (self.parser.call_id(delta.index), delta.name))
        kind = self.kinds[type(delta)]
        begun = [] if self.parts and self.parts[-1].kind == kind else self.begin(kind)
        part = self.parts[-1]
        part.text += delta.text
        part.logprobs += logprobs
        return [*begun, *self.added(part, delta.text, logprobs)]

    def begin(self, kind: str, call: tuple[str, str] = ("", "")) -> list[Event]:
        """Begin a part, and end the one before it."""
        ended = self.finish("completed")
        self.parts.append(Part(kind, len(self.parts), call))
        return [*ended, *self.begun(self.parts[-1])]

    def finish(self, status: str) -> list[Event]:
        """End the last part, if there is one."""
        if not self.parts:
            return []
        self.parts[-1].status = status
        return self.ended(self.parts[-1])

    def new_logprobs(self) -> Logprobs:
        """Log-probabilities of the tokens since the last delta, where the object has them."""
        return []

    @abstractmethod
    def begun(self, part: Part) -> list[Event]:
        """The first events of a part."""

    @abstractmethod
    def added(self, part: Part, text: str, logprobs: Logprobs) -> list[Event]:
        """The events of text that a part has got."""

    @abstractmethod
    def ended(self, part: Part) -> list[Event]:
        """The last events of a part."""

    @abstractmethod
    def render(self) -> dict[str, Any]:
        """The object as it is now."""
