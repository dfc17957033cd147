"""Unread answers: what clients do not read is bounded, in time and in bytes.

A gateway holds an answer that has ended until its client has read it. A connection is cut if its client takes
nothing for a minute; and while more than 256 MiB wait, the one that has waited longest is
cut. Its request is cancelled, as that of every client that leaves.
"""

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import sys
import termios
import time
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope

from api.event_loop import Pace
from common.metrics import catalogue
from common.process.event_loop import until_beat

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""A client that takes nothing of its answer for so long is cut off, its request cancelled."""
MAX_UNREAD_BYTES = 256 * 2**20
"""Unread answers in a gateway; beyond it the client that read nothing for longest is cut off."""

UNREAD = "unread"
"""Key of UnreadAnswers in the server's state, and of a connection's Unread in a request's state."""
CHECK_S = 0.5
RECORD_BYTES = 128
"""About what a token takes in memory: id, log-probability and text, as objects in lists."""
BYTES_ACKED = struct.Struct("<Q")
BYTES_ACKED_AT = 120
"""Offset of `tcpi_bytes_acked` in `struct tcp_info` (Linux 4.1 and later)."""
INT = struct.Struct("=i")
STATE_CLOSED = 7
"""`TCP_CLOSE`, in the first byte of `struct tcp_info`."""

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


# --- connections --------------------------------------------------------------------------------------------


class Unread:
    """What the client of one connection has not read yet.

    Attributes:
        answer_id: id of the answer that is being written; empty for none.
        count_ended: counts the records of that answer that are complete and not rendered yet.
        since_s: monotonic time since which something waits; None if nothing does.
        taken: result of `bytes_taken` at the last check; 0 if nothing waited.
        taken_s: monotonic time since which the client has taken nothing.
        is_half_closed: whether the client has closed its side. It may still read.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.answer_id = ""
        self.count_ended: Callable[[], int] | None = None
        self.since_s: float | None = None
        self.taken = 0
        self.taken_s = 0.0
        self.is_half_closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes that wait to be written, and about those of a complete answer that is not rendered yet."""
        num_records = self.count_ended() if self.count_ended is not None else 0
        return self.transport.get_write_buffer_size() + RECORD_BYTES * num_records

    def check(self, now_s: float) -> None:
        """Note whether the client has taken something since the last check."""
        taken = bytes_taken(self.transport) if self.transport.get_write_buffer_size() else 0
        if not taken or taken != self.taken:
            self.taken, self.taken_s = taken, now_s
        if not self.num_bytes:
            self.since_s = None
        elif self.since_s is None:
            self.since_s = now_s


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
    unread: Unread | None = scope["state"].get(UNREAD)
    is_connected = True
    while is_connected:
        if unread is not None and unread.is_half_closed:  # checked before each wait: it may be so since long
            await probe()
        is_connected = (await receive())["type"] != "http.disconnect"


class UnreadAnswers:
    """The connections of a gateway, and the bounds of what they may hold."""

    def __init__(self) -> None:
        self.timeout_s = TIMEOUT_S
        self.max_bytes = MAX_UNREAD_BYTES
        self.connections: set[Unread] = set()

    async def watch(self) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(until_beat(CHECK_S))
            await self.check_time()
            self.check_bytes()

    async def check_time(self) -> None:
        pace = Pace()
        for unread in [*self.connections]:
            if unread.is_half_closed and is_reset(unread.transport.get_extra_info("socket")):
                unread.transport.abort()  # it is not read from, so asyncio does not notice
                continue
            unread.check(time.monotonic())
            if time.monotonic() - unread.taken_s > self.timeout_s and unread in self.connections:
                self.cut(unread, "timeout", f"it took nothing for {self.timeout_s:g} s")
            await pace.step(0)

    def check_bytes(self) -> None:
        held = sorted(
            (unread for unread in self.connections if unread.since_s is not None),
            key=lambda unread: unread.since_s or 0.0,
        )
        total = sum(unread.num_bytes for unread in held)
        for unread in held:
            if total <= self.max_bytes:
                return
            total -= unread.num_bytes
            self.cut(unread, "bytes", f"unread answers held more than {self.max_bytes}")

    def cut(self, unread: Unread, reason: str, why: str) -> None:
        """Cut a connection at once, and drop what waits for its client."""
        answer_id, num_bytes = unread.answer_id or "none", unread.num_bytes
        log.warning("a client is cut off with %d bytes unread: %s (request: %s)", num_bytes, why, answer_id)
        catalogue.UNREAD_CUT.add(1, reason)
        self.connections.discard(unread)
        unread.transport.abort()
