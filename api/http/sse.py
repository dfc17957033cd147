"""Server-sent events: the feed of an answer's frames, the response that writes them, and what its client has
read of them.

Every gateway that renders an answer from its first token sends the same bytes, apart from keep-alive
comments. A frame depends only on the admitted request (`HttpAnswer`) and its tokens: on no clock, no
gateway's name, no grouping of tokens on their way. The frames of all choices have one order, and each is one
chunk of HTTP.
"""

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.process.event_loop import run_until_one_ends

MAX_ITEMS = 128
"""Frames that are rendered before other streams have their turn."""
CYCLE = "tokenfleet.cycle"
"""Extension of a scope: uvicorn's object for a request and its response."""
SSE_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
KEEP_ALIVE_S = 15.0
COMMENT = b": \n\n"
"""A keep-alive comment between two frames. It is an event of its own, for clients that split a stream at
empty lines.
"""
COMMENT_AMONG_IDS = b": \n"
"""A keep-alive comment if frames have ids: after the first id the `openai` package reads an event without
data at every empty line.
"""

# --- feeds --------------------------------------------------------------------------------------------------


class Change(asyncio.Event):
    """An event that is set when an answer has something new.

    Attributes:
        listener: if there is one, `set` calls it instead.
    """

    listener: Callable[[], None] | None = None

    def set(self) -> None:
        if self.listener is None:
            super().set()
        else:
            self.listener()


class Feed(AsyncIterator[list[bytes]]):
    """The frames of one answer, in order: `take` returns those that are ready, an iteration waits for them.

    Attributes:
        changed: set when there may be more.
        ended: whether all have been taken; then `take` must not be called again.
    """

    def __init__(self, changed: Change) -> None:
        self.changed = changed
        self.ended = False

    @abstractmethod
    def take(self) -> list[bytes]:
        """The next frames, about MAX_ITEMS at most; none if no more are ready."""

    @property
    def is_prepared(self) -> bool:
        """Whether `take` may be called without `prepare` from now on."""
        return True

    async def prepare(self) -> None:
        """Do long work that the next frames need."""

    async def __anext__(self) -> list[bytes]:
        """Frames that are ready, at least one; other tasks have their turn first."""
        await asyncio.sleep(0)
        while not self.ended:
            await self.prepare()
            self.changed.clear()
            if new := self.take():
                return new
            if not self.ended:
                await self.changed.wait()
        raise StopAsyncIteration


class RestOfFeed(Feed):
    """Another feed without its first `num_seen` frames; `prepare` skips those that are ready.

    Attributes:
        num_seen: number of frames that are still to be skipped.
        first: frames that came together with the last one skipped.
    """

    def __init__(self, source: Feed, num_seen: int) -> None:
        super().__init__(source.changed)
        self.source = source
        self.num_seen = num_seen
        self.first: list[bytes] = []

    def take(self) -> list[bytes]:
        first, self.first = self.first, []
        new = first or ([] if self.source.ended else self.source.take())
        self.ended = self.source.ended
        return new

    @property
    def is_prepared(self) -> bool:
        return not self.num_seen and self.source.is_prepared

    async def prepare(self) -> None:
        await self.source.prepare()
        while self.num_seen and not self.source.ended and (new := self.source.take()):
            self.first = new[self.num_seen :]
            self.num_seen = max(0, self.num_seen - len(new))
            await asyncio.sleep(0)
            await self.source.prepare()


class MergedFeed(Feed):
    """The frames of several answers, by their ids. A frame's id is `{answer}/{ordinal}`.

    The order of the frames of one answer is fixed. Answers do not wait for each other: this is what several
    choices of one answer cannot have, since their frames have one order.
    """

    def __init__(self, feeds: Mapping[str, Feed]) -> None:
        super().__init__(Change())
        self.feeds = dict(feeds)
        for feed in feeds.values():
            feed.changed.listener = self.changed.set

    def take(self) -> list[bytes]:
        new: list[bytes] = []
        for name, feed in [*self.feeds.items()]:
            del self.feeds[name]
            new += [frame.replace(b"id: ", b"id: %b/" % name.encode(), 1) for frame in feed.take()]
            if not feed.ended:
                self.feeds[name] = feed  # behind those that had no turn yet
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


# --- writing ------------------------------------------------------------------------------------------------


def as_chunk(part: bytes, http_version: str) -> bytes:
    """A part of a body of unknown length, as h11 writes it; HTTP/1.0 has no chunks."""
    return b"%x\r\n%b\r\n" % (len(part), part) if http_version >= "1.1" else part


class FeedResponse(Response):
    """Server-sent events of the hot path: a plain ASGI response, since sse-starlette would encode, log and
    time every frame.

    Only the head and the end of the response pass the middlewares: frames go to the server itself. A frame
    that is ready while its client reads is written in the call that brings its token: to wake a task would
    take twice the time of all other work.

    Attributes:
        comment: keeps the connection alive, every `ping_interval` seconds.
        may_comment: whether a comment may be written now, without waiting.
        cycle: uvicorn's object for the request: it has the transport, its flow control, and `send`.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: Feed, comment: bytes, headers: Mapping[str, str]) -> None:
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
        """Send the response until the client has gone. A task group is not used: its cancelled tasks would
        keep the response in a reference cycle until a full garbage collection, which holds the event loop.
        """
        self.cycle = scope["extensions"][CYCLE]
        self.http_version = scope["http_version"]
        gone = wait_for_disconnect(scope, receive, self.send_comment)
        await run_until_one_ends(self.send_frames(send), gone, self.ping())

    async def send_frames(self, send: Send) -> None:
        async with self.send_lock:
            head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(head)
        async for frames in self.frames:
            for frame in frames:  # a chunk each: chunks do not depend on how frames were grouped
                await self.cycle.send({"type": "http.response.body", "body": frame, "more_body": True})
            if len(frames) < MAX_ITEMS and self.frames.is_prepared:
                await self.write_as_they_come()
        async with self.send_lock:
            self.is_open = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def write_as_they_come(self) -> None:
        """Write frames when they come. Return after the last one, or when one cannot be written at once."""
        self.interrupted = asyncio.get_running_loop().create_future()
        self.frames.changed.listener = self.write_now
        try:
            self.write_now()  # frames that have come since the last `take`
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
                self.cycle.transport.write(as_chunk(frame, self.http_version))
            if self.frames.ended or len(new) >= MAX_ITEMS:
                self.interrupted.set_result(None)
        except Exception as error:
            self.interrupted.set_exception(error)

    async def ping(self) -> None:
        """Send comments until the last frame."""
        while self.is_open:
            await asyncio.sleep(self.ping_interval)
            await self.send_comment()

    async def send_comment(self) -> None:
        async with self.send_lock:
            if self.is_open and self.may_comment():
                await self.cycle.send({"type": "http.response.body", "body": self.comment, "more_body": True})


# --- connections --------------------------------------------------------------------------------------------


CONNECTIONS = "connections"
"""Key of a server's Connections in its state."""
CONNECTION = "connection"
"""Key of a request's state: its Connection."""
RECORD_BYTES = 128
"""About what a token takes in memory: id, log-probability and text, as objects in lists."""
BYTES_ACKED = struct.Struct("<Q")
BYTES_ACKED_AT = 120
"""Offset of `tcpi_bytes_acked` in `struct tcp_info` (Linux 4.1 and later)."""
INT = struct.Struct("=i")
STATE_CLOSED = 7
"""`TCP_CLOSE`, in the first byte of `struct tcp_info`."""


class Connection:
    """One connection of a client, and what it has not read yet.

    Attributes:
        readers: of the answers that are being written on it, as frames.
        taken: result of `bytes_taken` at the last check; 0 if nothing waited.
        taken_s: monotonic time since which the client has taken nothing.
        is_half_closed: whether the client has closed its side. It may still read.
    """

    def __init__(self, transport: asyncio.Transport, address: str = "") -> None:
        self.transport = transport
        self.address = address
        self.readers: Sequence[Any] = ()
        self.taken = 0
        self.taken_s = time.monotonic()
        self.is_half_closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes that wait to be written, and about those of a complete answer that is not rendered yet."""
        num_records: int = sum(reader.num_records for reader in self.readers)
        return self.transport.get_write_buffer_size() + RECORD_BYTES * num_records

    def check(self, now_s: float) -> None:
        """Note whether the client has taken something since the last check."""
        taken = bytes_taken(self.transport) if self.transport.get_write_buffer_size() else 0
        if not taken or taken != self.taken:
            self.taken, self.taken_s = taken, now_s


def bytes_taken(transport: asyncio.Transport) -> int:
    """A number that grows when the client takes something from its connection."""
    own = transport.get_extra_info("socket")
    if own is not None:
        with contextlib.suppress(OSError):  # closed, no TCP, or a kernel that does not count
            return bytes_acked(own)
    return -transport.get_write_buffer_size()


async def wait_for_disconnect(scope: Scope, receive: Receive, probe: Callable[[], Awaitable[None]]) -> None:
    """Return when the client of a request has gone. A client that has closed its side may still read: `probe`
    then writes something, which the kernel of a client that has gone refuses.
    """
    connection: Connection = scope["state"][CONNECTION]
    is_connected = True
    while is_connected:
        if connection.is_half_closed:  # checked before each wait: it may be so since long
            await probe()
        is_connected = (await receive())["type"] != "http.disconnect"


# --- the kernel's counts ------------------------------------------------------------------------------------


def bytes_written(connection: socket.socket) -> int:
    """Bytes that all processes have given to the kernel on a connection, plus a constant of the connection.
    They survive the death of a gateway, unlike bytes in its own buffer. Nobody may write meanwhile. Linux
    only: raises OSError elsewhere.

    `bytes_sent - bytes_retrans + notsent_bytes` would count a packet twice that this machine's own queue
    drops: it is sent anew without being a retransmission.
    """
    while True:
        acked = bytes_acked(connection)
        # SIOCOUTQ: bytes that the client has not acknowledged, sent or not
        queued: int = INT.unpack(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(INT.size)))[0]
        if acked == bytes_acked(connection):  # no acknowledgement came in between
            return acked + queued


def bytes_acked(connection: socket.socket) -> int:
    size = BYTES_ACKED_AT + BYTES_ACKED.size
    is_linux = sys.platform == "linux"
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size) if is_linux else b""
    if len(info) < size:
        raise OSError("this kernel does not count the bytes of a connection")
    count: int = BYTES_ACKED.unpack_from(info, BYTES_ACKED_AT)[0]
    return count


def is_reset(connection: socket.socket | None) -> bool:
    """Whether the client closed the connection and then refused what was written."""
    if connection is None or sys.platform != "linux":
        return False
    with contextlib.suppress(OSError):  # no TCP, or closed here
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == STATE_CLOSED
    return False
