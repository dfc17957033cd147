"""A response as it is sent: in frames, or whole. A frame is an `event:` line, its id, and the event with its
sequence number.
"""

from collections.abc import Sequence

from api.event_loop.feed import MAX_ITEMS, Feed
from api.inference.headers import total_headers
from api.inference.respond import AnswerRenderer
from api.json import to_json
from api.response_object.items import Event
from api.response_object.response import ResponseObjectRenderer
from api.streams.stream import Stream
from api.streams.whole import Whole
from common.messages.answer import HttpAnswer


class ResponseFrames(Feed[bytes]):
    """All frames of a response; the first ones need no token."""

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        [stream] = streams
        super().__init__(stream.changed)
        self.renderer = ResponseObjectRenderer(answer, stream)
        self.first = self.renderer.first_events()
        self.num_frames = 0

    def take(self) -> list[bytes]:
        events, self.first = self.first, []
        while self.renderer.has_more and len(events) < MAX_ITEMS:
            events += self.renderer.next_events()
        self.ended = self.renderer.ended
        new = [frame(i, event) for i, event in enumerate(events, self.num_frames)]
        self.num_frames += len(new)
        return new


def frame(sequence_number: int, event: Event) -> bytes:
    """A frame; ids count from 1, sequence numbers from 0."""
    body = to_json(event | {"sequence_number": sequence_number})
    return b"event: %b\nid: %d\ndata: %b\n\n" % (event["type"].encode(), sequence_number + 1, body)


def render_whole(answer: HttpAnswer, streams: Sequence[Stream], arrived_s: float) -> Whole:
    [stream] = streams
    body = to_json(ResponseObjectRenderer(answer, stream).render_so_far())
    return body, total_headers(answer, streams, stream.num_tokens, arrived_s)


RENDERER = AnswerRenderer(ResponseFrames, render_whole)
