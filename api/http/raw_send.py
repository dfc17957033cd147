"""Raw send: the one place that goes past the middlewares and past the library that frames server-sent events.

The frames of a token stream are written with the server's own ASGI `send`: no middleware changes anything
after the start of a response. A frame that is ready while its client reads is written to the connection in
the call that brings its token: to wake a task for it takes twice the time of all else.
"""

import asyncio
from typing import Any

from sse_starlette import EventSourceResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from api.heir.answer_socket import CYCLE, socket_of
from api.heir.rest_of_answer import framed
from api.http.unread import is_half_closed
from api.streams.feed import MAX_ITEMS, Feed
from common.process.first_end import run_until_one_ends

STATE_KEY = "raw_send"


async def keep_raw_send(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """The outermost middleware: keeps the server's `send` in the request's state."""
    scope.setdefault("state", {})[STATE_KEY] = send
    await app(scope, receive, send)
    scope.clear()  # what is in it refers to it: it would stay until a full garbage collection


class RawEventSourceResponse(EventSourceResponse):
    """Server-sent events whose frames are bytes already, and are sent without the middlewares; `comment`
    keeps the connection alive.
    """

    def __init__(self, frames: Feed[bytes], comment: bytes, **options: Any) -> None:
        super().__init__(frames, **options)
        self.frames = frames
        self.comment = comment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response as the library does, but without a task group: its cancelled tasks keep the whole
        response in a circle, which only a full garbage collection frees, and that holds the event loop.
        """
        self.raw_send: Send = scope["state"][STATE_KEY]
        self.answer_socket = socket_of(scope)
        self.cycle = scope["extensions"][CYCLE]
        self.scope = scope
        await run_until_one_ends(
            self._stream_response(send), self._listen_for_disconnect(receive), self._ping(send)
        )

    async def _stream_response(self, send: Send) -> None:
        """Send the frames as the library does, but without encoding, a log line and a timeout for every
        frame.
        """
        async with self._send_lock:
            head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(head)
        async for frames in self.frames:
            for frame in frames:  # each is a chunk of its own, so chunks do not tell how frames were grouped
                await self.raw_send({"type": "http.response.body", "body": frame, "more_body": True})
            if len(frames) < MAX_ITEMS and self.frames.is_prepared:
                await self.write_as_they_come()
        async with self._send_lock:
            self.active = False
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

    async def _ping(self, send: Send) -> None:
        """Send comments as the library does."""
        while self.active:
            await asyncio.sleep(self._ping_interval)
            await self.send_comment()

    async def _listen_for_disconnect(self, receive: Receive) -> None:
        """Return when the client has gone. One that sends no more may still read: a comment shows whether it
        does, since the kernel of one that has gone refuses it.
        """
        is_connected = True
        while is_connected:
            if is_half_closed(self.scope):  # perhaps long ago: looked at before each wait
                await self.send_comment()
            is_connected = (await receive())["type"] != "http.disconnect"

    async def send_comment(self) -> None:
        """Send a comment; where a socket is kept, its keeper knows the place of each."""
        async with self._send_lock:
            if self.active and (self.answer_socket is None or self.answer_socket.may_comment()):
                await self.raw_send({"type": "http.response.body", "body": self.comment, "more_body": True})
