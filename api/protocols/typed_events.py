"""Typed events: streams of the Responses and the Messages API build an object, event by event."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

from api.answers.answer import HttpAnswer
from api.answers.scanner import ContentDelta, Delta
from api.http.sse import MAX_ITEMS, Feed
from api.json import to_json
from api.protocols.openai import new_choices, new_parser
from api.protocols.protocol import AnswerRenderer, WholeBody
from api.streams.stream import Stream

Event = dict[str, Any]
"""An event of a stream, without its sequence number."""


class EventRenderer(ABC):
    """Renders one answer, piece by piece.

    Attributes:
        parser: finds reasoning and calls in the text; None if all of it is content.
        ended: whether everything was taken.
        has_sequence: whether each event has its number, counted from 0; then each frame has an id.
    """

    has_sequence = False

    def __init__(self, answer: HttpAnswer, stream: Stream) -> None:
        self.answer = answer
        self.stream = stream
        [self.choice] = new_choices(answer, [stream])
        self.parser = new_parser(answer)
        self.ended = False

    @property
    def has_more(self) -> bool:
        """Whether there is a piece, or an end, to take."""
        return not self.ended and (self.choice.has_piece or self.choice.failed)

    def next_events(self) -> list[Event]:
        """Take the next piece, or the end. Returns its events, which may be none."""
        if not self.choice.has_piece:
            self.ended = True
            return [self.failure_event()]
        piece = self.choice.take_piece()
        if self.parser is not None:
            deltas = self.parser.read(piece.text, len(piece.tokens), self.choice.ended)
        else:  # none for a token that shows no text of its own
            deltas = [ContentDelta(piece.text)] if piece.text else []
        events = [event for delta in deltas for event in self.add(delta)]
        if self.choice.ended:
            self.ended = True
            events += self.last_events()
        return events

    def render_so_far(self) -> dict[str, Any]:
        """The object with all that its stream has."""
        while self.has_more:
            self.next_events()
        return self.render()

    @abstractmethod
    def first_events(self) -> list[Event]:
        """The events before the first token."""

    @abstractmethod
    def add(self, delta: Delta) -> list[Event]:
        """Add a delta to the last part of the object if it is of its kind, else to a new one."""

    @abstractmethod
    def last_events(self) -> list[Event]:
        """The events after the last piece."""

    @abstractmethod
    def failure_event(self) -> Event:
        """The last event of an answer that failed."""

    @abstractmethod
    def render(self) -> dict[str, Any]:
        """The object as it is now."""


class EventFrames(Feed[bytes]):
    """All frames of an answer; the first ones are ready before the first token."""

    def __init__(self, kind: type[EventRenderer], answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        [stream] = streams
        super().__init__(stream.changed)
        self.renderer = kind(answer, stream)
        self.first = self.renderer.first_events()
        self.has_ids = answer.numbered or kind.has_sequence
        self.ordinals = count(1)

    def take(self) -> list[bytes]:
        events, self.first = self.first, []
        while self.renderer.has_more and len(events) < MAX_ITEMS:
            events += self.renderer.next_events()
        self.ended = self.renderer.ended
        return [self.frame(event) for event in events]

    def frame(self, event: Event) -> bytes:
        """The frame of an event: its type, its id if frames have ids, and its data."""
        ordinal = next(self.ordinals)
        body = event | {"sequence_number": ordinal - 1} if self.renderer.has_sequence else event
        own_id = b"id: %d\n" % ordinal if self.has_ids else b""
        return b"event: %b\n%bdata: %b\n\n" % (event["type"].encode(), own_id, to_json(body))


def render_whole(kind: type[EventRenderer], answer: HttpAnswer, streams: Sequence[Stream]) -> WholeBody:
    [stream] = streams
    return to_json(kind(answer, stream).render_so_far()), stream.num_tokens


def renderer_of(kind: type[EventRenderer]) -> AnswerRenderer:
    return AnswerRenderer(partial(EventFrames, kind), partial(render_whole, kind))
