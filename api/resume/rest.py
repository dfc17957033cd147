"""Rest: the frames of an answer that its client does not have yet, alone or beside those of other answers."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from api.answers.answer import HttpAnswer
from api.errors import ApiError, failed, invalid, quoted
from api.http.sse import COMMENT_AMONG_IDS, MAX_ITEMS, SSE_HEADERS, Change, Feed, FeedResponse, RestOfFeed
from api.http.unread import UNREAD, Unread
from api.protocols.table import protocol_of
from api.requests.pool import Pool
from api.resume import attach
from api.streams.answer_trace import count_longest, end_answer
from api.streams.http_response import TokenStream
from api.streams.stream import Stream

LAST_EVENT_ID = "Last-Event-ID"
READ_AGAIN_S, READ_PAUSE_S = 2.0, 0.1
"""How long and how often an answer is read again that has fewer frames than its client says."""


def frames_of(answer: HttpAnswer, streams: Sequence[Stream]) -> Feed[bytes]:
    """All frames of a streamed answer."""
    frames = protocol_of(answer.route).renderer.frames
    assert frames is not None, answer.route
    return frames(answer, streams)


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
        """Become the reader, unless there is one, and send the frames. Raises ApiError."""
        self.reader = self.reader or await attach.become_reader(self.pool, self.streams)
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
    frames = RestOfFeed(frames_of(answer, streams), num_seen)
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


# --- several answers on one connection ----------------------------------------------------------------------


class MergedFeed(Feed[bytes]):
    """The frames of several answers, by their ids. A frame's id is `{answer}/{ordinal}`.

    The order of the frames of one answer is fixed. Answers do not wait for each other: this is what several
    choices of one answer cannot have, since their frames have one order.
    """

    def __init__(self, feeds: Mapping[str, Feed[bytes]]) -> None:
        super().__init__(Change())
        self.feeds = dict(feeds)
        for feed in feeds.values():
            feed.changed.listener = self.changed.set

    def take(self) -> list[bytes]:
        new: list[bytes] = []
        for answer_id, feed in [*self.feeds.items()]:
            del self.feeds[answer_id]
            new += [name_frame(answer_id, frame) for frame in feed.take()]
            if not feed.ended:
                self.feeds[answer_id] = feed  # behind those that had no turn yet
            if len(new) >= MAX_ITEMS:
                break
        self.ended = not self.feeds
        return new

    @property
    def is_prepared(self) -> bool:
        return all(feed.is_prepared for feed in self.feeds.values())

    async def prepare(self) -> None:
        for feed in self.feeds.values():
            await feed.prepare()


def name_frame(answer_id: str, frame: bytes) -> bytes:
    """A numbered frame, with the answer's id before its number."""
    return frame.replace(b"id: ", b"id: %b/" % answer_id.encode(), 1)


class MergedStream(FeedResponse):
    """Response of the rests of several answers. Each is released at the end as `TokenStream` does: its
    request waits for its client as long as that client asked for.

    No socket is kept for it: after the death of its gateway the client asks another one.
    """

    def __init__(self, rests: Sequence[Rest]) -> None:
        self.merged = MergedFeed({rest.answer.request_id: rest.frames for rest in rests})
        super().__init__(self.merged, COMMENT_AMONG_IDS, SSE_HEADERS | {"connection": "keep-alive"})
        self.rests = rests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread: Unread = scope["state"][UNREAD]
        unread.count_ended = self.count_ended
        try:
            await super().__call__(scope, receive, send)
        finally:
            unread.count_ended = None
            for rest in self.rests:
                end_answer(scope, rest.answer, rest.streams, rest.reader, goes_on=False)
                count_longest(rest.streams)
                release(rest)

    def count_ended(self) -> int:
        """Number of records of streams that have ended; they wait to be rendered."""
        return sum(
            stream.num_records
            for rest in self.rests
            if rest.answer.request_id in self.merged.feeds
            for stream in rest.streams
            if stream.terminal
        )


def release(rest: Rest) -> None:
    for stream in rest.streams:
        rest.pool.admission.release(stream, rest.reader, rest.answer.terms.goes_on_s)


async def respond_with_rests(rests: Sequence[Rest]) -> MergedStream:
    """Become the reader of all answers, and send their frames. Raises ApiError: then those that were read
    already wait for their client again.
    """
    try:
        for rest in rests:
            rest.reader = await attach.become_reader(rest.pool, rest.streams)
    except BaseException:
        for rest in rests:
            if rest.reader:
                release(rest)
        raise
    return MergedStream(rests)
