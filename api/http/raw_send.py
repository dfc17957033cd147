"""Raw send: the one place that goes past the middlewares.

The frames of a token stream are written with the server's own ASGI `send`: no middleware changes anything
after the start of a response. A frame that is ready while its client reads is written to the connection in
the call that brings its token: to wake a task for it takes twice the time of all else.
"""

import asyncio
from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.event_loop.feed import MAX_ITEMS, Feed
from api.http.unread import is_half_closed
from common.process.first_end import run_until_one_ends

CYCLE = "tokenfleet.cycle"
"""Extension of a scope: the server's own object for a request and its response."""
STATE_KEY = "raw_send"
KEEP_ALIVE_S = 15.0


async def keep_raw_send(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """The outermost middleware: keeps the server's `send` in the request's state."""
    scope.setdefault("state", {})[STATE_KEY] = send
    await app(scope, receive, send)
    scope.clear()  # what is in it refers to it: it would stay until a full garbage collection


def framed(part: bytes, http_version: str) -> bytes:
    """A part of a body of unknown length, as h11 frames it: a chunk, which HTTP/1.0 does not have."""
    return b"%x\r\n%b\r\n" % (len(part), part) if http_version >= "1.1" else part


class FeedResponse(Response):
    """Server-sent events of the hot path: a plain ASGI response, since sse-starlette would encode, log and
    time every frame.

    Attributes:
        frames: bytes already, and sent without the middlewares.
        comment: keeps the connection alive, every `ping_interval` seconds.
        may_comment: whether a comment may be written now, without waiting.
    """

    def __init__(self, frames: Feed[bytes], comment: bytes, headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(headers)
        self.frames = frames
        self.comment = comment
        self.ping_interval = KEEP_ALIVE_S
        self.may_comment: Callable[[], bool] = lambda: True
        self.is_open = True
        self.send_lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response until the client has gone. There is no task group: its cancelled tasks keep the
        whole response in a circle, which only a full garbage collection frees, and that holds the event loop.
        """
        self.raw_send: Send = scope["state"][STATE_KEY]
        self.cycle = scope["extensions"][CYCLE]
        self.scope = scope
        await run_until_one_ends(self.send_frames(send), self.wait_for_disconnect(receive), self.ping())

    async def send_frames(self, send: Send) -> None:
        async with self.send_lock:
            head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(head)
        async for frames in self.frames:
            for frame in frames:  # each is a chunk of its own, so chunks do not tell how frames were grouped
                await self.raw_send({"type": "http.response.body", "body": frame, "more_body": True})
            if len(frames) < MAX_ITEMS and self.frames.is_prepared:
                await self.write_as_they_come()
        async with self.send_lock:
            self.is_open = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def write_as_they_come(self) -> None:
        """Return when there may be frames that cannot be written at once, or after the last one."""
        self.interrupted = asyncio.get_running_loop().create_future()
        self.frames.changed.listener = self.write_now
        try:
            self.write_now()  # what came since the last were taken
            await self.interrupted
        finally:
            self.frames.changed.listener = None

    def write_now(self) -> None:
        """Write the frames that are ready, as long as the client reads."""
        if self.interrupted.done() or self.cycle.disconnected:
            return
        try:
            if self.frames.ended or self.cycle.flow.write_paused:
                self.interrupted.set_result(None)
                return
            new = self.frames.take()
            for frame in new:
                self.cycle.transport.write(framed(frame, self.scope["http_version"]))
            if self.frames.ended or len(new) >= MAX_ITEMS:
                self.interrupted.set_result(None)
        except Exception as error:
            self.interrupted.set_exception(error)

    async def ping(self) -> None:
        """Send comments until the last frame."""
        while self.is_open:
            await asyncio.sleep(self.ping_interval)
            await self.send_comment()

    async def wait_for_disconnect(self, receive: Receive) -> None:
        """Return when the client has gone. One that sends no more may still read: a comment shows whether it
        does, since the kernel of one that has gone refuses it.
        """
        is_connected = True
        while is_connected:
            if is_half_closed(self.scope):  # perhaps long ago: looked at before each wait
                await self.send_comment()
            is_connected = (await receive())["type"] != "http.disconnect"

    async def send_comment(self) -> None:
        async with self.send_lock:
            if self.is_open and self.may_comment():
                await self.raw_send({"type": "http.response.body", "body": self.comment, "more_body": True})
