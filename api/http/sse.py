"""Server-sent events: the response that streams tokens, and the updates of a stream that are worth a
frame.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from sse_starlette import ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.types import Receive, Scope, Send

from api.http.raw_send import RawEventSourceResponse
from api.inference.stream import Stream

KEEP_ALIVE_S = 15
HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}

# A server that is told to stop finishes its streams: the library would cut them.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


class TokenStream(RawEventSourceResponse):
    """Response of `frames`, with keep-alive comments; `release` is called once for each stream, when all is
    sent or the client has gone.
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
        self.streams = streams
        self.release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for stream in self.streams:
                self.release(stream)


def keep_alive() -> ServerSentEvent:
    return ServerSentEvent(comment="", sep="\n")


def frame(body: bytes) -> bytes:
    return b"data: %b\n\n" % body


async def updates(stream: Stream) -> AsyncIterator[tuple[range, bool]]:
    """(indices of tokens to show now, whether the stream has ended), whenever there is something new, up to
    the end.

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
