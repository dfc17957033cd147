"""Frames of a response's stream: an `event:` line, the frame's id, and the event with its sequence number."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from api.http.sse import MAX_FRAMES
from api.inference.stream import Stream
from api.json import to_json
from api.response_object.items import Event
from api.response_object.response import ResponsesRenderer
from common.messages.answer import HttpAnswer


async def stream_frames(answer: HttpAnswer, streams: Sequence[Stream]) -> AsyncIterator[list[bytes]]:
    """Yields all frames as they come, MAX_FRAMES or a few more at a time while there are so many. The first
    ones need no token.
    """
    [stream] = streams
    renderer = ResponsesRenderer(answer, stream)
    events, num_frames = renderer.begin(), 0
    while True:
        stream.changed.clear()
        while renderer.has_more and len(events) < MAX_FRAMES:
            events += renderer.take()
        if events:
            yield [frame(i, event) for i, event in enumerate(events, num_frames)]
            num_frames += len(events)
            events = []
        if renderer.ended:
            return
        if renderer.has_more:
            await asyncio.sleep(0)
        else:
            await stream.changed.wait()


def frame(sequence_number: int, event: Event) -> bytes:
    """A frame; ids count from 1, sequence numbers from 0."""
    body = to_json(event | {"sequence_number": sequence_number})
    return b"event: %b\nid: %d\ndata: %b\n\n" % (event["type"].encode(), sequence_number + 1, body)
