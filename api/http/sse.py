"""Server-sent events: when a stream has something new to show, keep-alive comments, and the end of whoever
reads them.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.types import Receive, Scope, Send

from api.inference.stream import Stream

KEEP_ALIVE_S = 15
HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}

# streams in flight are finished, not cut, when the server is told to stop
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


class TokenStream(EventSourceResponse):
    """`frames` of one or more streams as an answer. `leave` is called once for each, when it is sent or its
    client is gone.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        streams: Sequence[Stream],
        headers: Mapping[str, str],
        release: Callable[[Stream], None],
    ) -> None:
        super().__init__(
            frames,
            headers=HEADERS | dict(headers),
            sep="\n",
            ping=KEEP_ALIVE_S,
            ping_message_factory=keep_alive,
        )
        self.streams, self.release = streams, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.send_body: Send = scope["state"]["send"]
        try:
            await super().__call__(scope, receive, send)
        finally:
            for stream in self.streams:
                self.release(stream)

    async def _stream_response(self, send: Send) -> None:
        """As the library does it, without what it does for every chunk: these are bytes already, to send them
        has no deadline, and nobody between us and the server has to do with more than the start.
        """
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self.body_iterator:
            await self.send_body({"type": "http.response.body", "body": chunk, "more_body": True})
        async with self._send_lock:
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def keep_alive() -> ServerSentEvent:
    return ServerSentEvent(comment="", sep="\n")


def frame(body: bytes) -> bytes:
    return b"data: %b\n\n" % body


async def updates(stream: Stream) -> AsyncIterator[tuple[range, bool]]:
    """(indices of tokens to show now, whether the stream has ended), as often as there is something new, up
    to the end.

    The last token of a finished answer is in no range: it is shown together with the end.
    """
    shown = 0
    while True:
        await stream.changed.wait()
        stream.changed.clear()
        ready, ended = stream.num_ready, stream.terminal is not None
        if ready > shown or ended:
            yield range(shown, ready), ended
        shown = max(shown, ready)
        if ended:
            return
