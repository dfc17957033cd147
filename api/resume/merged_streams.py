"""Merged streams: the frames of several streamed answers on one connection, each as soon as it is there."""

from collections.abc import Mapping, Sequence

from starlette.types import Receive, Scope, Send

from api.http.middleware import count_longest, end_answer
from api.http.sse import COMMENT_AMONG_IDS, MAX_ITEMS, SSE_HEADERS, UNREAD, Change, Feed, FeedResponse, Unread
from api.resume import attach
from api.resume.rest import Rest


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
        rest.pool.admission.release(stream, rest.reader, rest.answer.terms)


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
