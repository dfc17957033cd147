"""Token stream: the response that streams the tokens of an answer."""

from collections.abc import Mapping, Sequence

from starlette.types import Receive, Scope, Send

from api.handover.answer_socket import flush_socket, socket_of
from api.http.sse import COMMENT, COMMENT_AMONG_IDS, HEADERS, Feed, FeedResponse
from api.http.unread import UNREAD, Unread
from api.streams.stream import Stream
from api.streams.whole import Release, keep_socket, release_all
from common.messages.answer import HttpAnswer


class TokenStream(FeedResponse):
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
        comment = COMMENT_AMONG_IDS if answer.numbered else COMMENT
        super().__init__(frames, comment, HEADERS | place | dict(headers) | {"connection": "keep-alive"})
        self.answer = answer
        self.streams = streams
        self.release = release
        self.reader = reader
        self.num_seen = num_seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread: Unread = scope["state"][UNREAD]
        unread.answer_id, unread.count_ended = self.answer.request_id, self.count_ended
        if (answer_socket := socket_of(scope)) is not None:
            self.may_comment = answer_socket.may_comment
        try:
            await keep_socket(scope, self.answer, self.streams, self.reader, self.num_seen, self.comment)
            await super().__call__(scope, receive, send)
            await flush_socket(scope)
        finally:
            unread.answer_id, unread.count_ended = "", None
            release_all(scope, self.answer, self.streams, self.release, self.reader)

    def count_ended(self) -> int:
        """Records of streams that have ended; they wait to be rendered."""
        return sum(stream.num_records for stream in self.streams if stream.terminal)
