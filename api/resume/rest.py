"""Rest: the frames of an answer that its client does not have yet."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from api.answers.answer import HttpAnswer
from api.errors import ApiError, failed, invalid, quoted
from api.http.sse import Feed, RestOfFeed
from api.protocols.table import protocol_of
from api.requests.pool import Pool
from api.resume import attach
from api.streams.http_response import TokenStream
from api.streams.stream import Stream

LAST_EVENT_ID = "Last-Event-ID"
READ_AGAIN_S, READ_PAUSE_S = 2.0, 0.1
"""How long and how often an answer is read again that has fewer frames than its client says."""


@dataclass(slots=True)
class Rest:
    """An answer, its streams, and the frames that its client does not have yet.

    Attributes:
        num_seen: frames that the client has.
        reader: number of its reader; 0 until it has one.
    """

    pool: Pool
    answer: HttpAnswer
    streams: Sequence[Stream]
    frames: Feed[bytes]
    num_seen: int
    reader: int = 0

    async def respond(self) -> TokenStream:
        """Become the reader, and send the frames. Raises ApiError."""
        self.reader = await attach.become_reader(self.pool, self.streams)
        return TokenStream(
            self.answer,
            frames=self.frames,
            streams=self.streams,
            headers={},
            release=self.pool.admission.release,
            reader=self.reader,
            num_seen=self.num_seen,
        )


async def read_rest(pool: Pool, answer: HttpAnswer, channel: str, num_seen: int) -> Rest | None:
    """The answer with the frames that the client does not have yet; None if it has all.

    A read may miss tokens that are being moved, from a log to a string or to another worker. So an answer is
    read again before a client's number of frames is refused.

    Raises ApiError: 410, 422, 424, 503.
    """
    end_s = time.monotonic() + READ_AGAIN_S
    while True:
        streams = await attach.read_committed(pool, answer, channel)
        if any(stream.terminal and stream.terminal.reason == "cancelled" for stream in streams):
            raise attach.cancelled_answer(answer.request_id)
        try:
            frames = await rest_of_frames(answer, streams, num_seen)
            return Rest(pool, answer, streams, frames, num_seen) if frames else None
        except ApiError as error:
            if error.status != 422 or time.monotonic() > end_s:
                raise
        await asyncio.sleep(READ_PAUSE_S)


async def rest_of_frames(answer: HttpAnswer, streams: Sequence[Stream], num_seen: int) -> Feed[bytes] | None:
    """The frames after the `num_seen` that the client has; None if it has all. Raises ApiError: 424, and 422
    if fewer frames than that are committed.
    """
    frames = RestOfFeed(protocol_of(answer.route).renderer(answer, streams).frames(), num_seen)
    await frames.prepare()
    failure = next((one.terminal for one in streams if one.terminal and not one.finished), None)
    if frames.num_seen and failure:  # a failed request keeps no tokens
        raise failed(failure)
    if frames.num_seen:
        raise invalid(
            f"`{LAST_EVENT_ID}` must be the id of a frame that was sent: this answer has "
            f"{num_seen - frames.num_seen} so far. Given: {quoted(num_seen)}",
            LAST_EVENT_ID,
        )
    if not frames.first and all(stream.terminal for stream in streams):
        frames.first = await anext(frames.source, [])
        if not frames.first:
            return None
    return frames
