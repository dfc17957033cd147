"""Server-sent events: the response that streams tokens, and its frames.

A frame is a function of the request as it was admitted (`HttpAnswer`) and of its tokens: no clock, no name of
a gateway, nothing of how tokens were grouped on their way. Frames come in one order, also those of several
choices, and each is one chunk of HTTP. So every gateway that renders an answer from its first token sends the
same bytes. Comments that keep the connection alive are the only bytes besides.
"""

from collections.abc import Mapping, Sequence
from itertools import count

from starlette.types import Receive, Scope, Send

from api.heir.answer_socket import flush_socket
from api.http.raw_send import RawEventSourceResponse
from api.http.release import Release, keep_socket, release_all
from api.http.unread import UNREAD, Unread
from api.streams.feed import Feed, MappedFeed
from api.streams.stream import Stream
from common.messages.answer import HttpAnswer

KEEP_ALIVE_S = 15
COMMENT = b": \n\n"
"""A keep-alive comment between two frames of a stream: an event of its own, for clients that cut a stream at
its empty lines.
"""
COMMENT_AMONG_IDS = b": \n"
"""The same where frames have ids: behind the first of these the `openai` package reads an event without data
at every empty line.
"""
HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}


class TokenStream(RawEventSourceResponse):
    """Response of `frames`, with keep-alive comments; `release` is called once for each stream, when the
    kernel has all bytes or the client has gone.

    Attributes:
        reader: number of the reader of the answer, 0 for the first.
        num_seen: frames that the client has already.
    """

    def __init__(
        self,
        answer: HttpAnswer,
        *,
        frames: Feed[bytes],
        streams: Sequence[Stream],
        headers: Mapping[str, str],
        release: Release,
        reader: int = 0,
        num_seen: int = 0,
    ) -> None:
        place = {"content-location": f"/requests/{answer.request_id}/stream"}
        super().__init__(
            frames,
            COMMENT_AMONG_IDS if answer.numbered else COMMENT,
            headers=HEADERS | place | dict(headers),
            sep="\n",
            ping=KEEP_ALIVE_S,
        )
        self.answer = answer
        self.streams = streams
        self.release = release
        self.reader = reader
        self.num_seen = num_seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread: Unread = scope["state"][UNREAD]
        unread.streams = tuple(self.streams)
        try:
            await keep_socket(scope, self.answer, self.streams, self.reader, self.num_seen, self.comment)
            await super().__call__(scope, receive, send)
            await flush_socket(scope)
        finally:
            unread.streams = ()
            release_all(scope, self.answer, self.streams, self.release, self.reader)


def sse_frames(answer: HttpAnswer, bodies: Feed[bytes]) -> Feed[bytes]:
    """The frames of an answer; an id is a frame's ordinal, counted from 1."""
    if not answer.numbered:
        return MappedFeed(bodies, lambda body: b"data: %b\n\n" % body)
    ordinals = count(1)
    return MappedFeed(bodies, lambda body: b"id: %d\ndata: %b\n\n" % (next(ordinals), body))
