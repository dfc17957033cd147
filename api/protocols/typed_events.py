"""Typed events: streams of the Responses and the Messages API build an object, event by event."""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import count
from operator import itemgetter
from typing import Any

from api.answers.answer import HttpAnswer
from api.answers.scanner import ContentDelta, Delta
from api.http.sse import Feed, MappedFeed
from api.json import to_json
from api.protocols.openai import Choice, ChunkFeed, ChunkRenderer, new_parser
from api.protocols.protocol import WholeBody
from api.streams.stream import Stream
from common.messages.events import Terminal

Event = dict[str, Any]
"""An event of a stream, without its sequence number."""


class EventRenderer(ChunkRenderer):
    """Renders one answer, piece by piece. Its chunks are whole frames.

    Attributes:
        parser: finds reasoning and calls in the text; None if all of it is content.
        has_sequence: whether each event has its number, counted from 0; then each frame has an id.
        ordinals: of the frames, counted from 1.
    """

    has_sequence = False

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        super().__init__(answer, streams)
        [self.stream], [self.choice] = streams, self.choices
        self.parser = new_parser(answer)
        self.ordinals = count(1)

    def frames(self) -> Feed[bytes]:
        """The first ones are ready before the first token."""
        return MappedFeed(ChunkFeed(self), itemgetter(1))

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
