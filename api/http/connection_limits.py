"""Connections: how many a gateway has, in all and from one address, what they may hold, and whose turn it is
to begin.

If a limit is reached, the connection that has been idle longest is closed for a new one. If none is idle, up
to NUM_RESERVED more are accepted for health and metrics; they get 503 for anything else.

A gateway holds an answer that has ended until its client has read it. A connection is cut if its client takes
nothing for a minute; and while more than 256 MiB wait, the one that has waited longest is cut. Its request is
cancelled, as that of every client that leaves.
"""

import asyncio
import logging
import resource
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import ApiError
from api.event_loop import Pace, Turns
from api.http.middleware import PROBES, error_response
from api.http.sse import Connection, is_reset
from api.protocols.protocol import errors_of
from common.metrics import catalogue
from common.process.event_loop import until_beat

log = logging.getLogger(__name__)

TIMEOUTS_S = {"head": 20.0, "body": 60.0}
"""Time in which a client must send a whole head, from its connection or first byte on, and a whole body."""
MIN_BODY_BYTES = 2**20
"""A body of which as much has come has its time once more: a file of a batch has up to 200 MiB."""
MAX_HEAD_BYTES = 64 * 2**10
"""Of a request's line and headers."""

OTHER_FILES = 256
"""Descriptors of a gateway besides those of clients: brokers, listeners, files."""
DEFAULT_CONNECTIONS = 16_384
"""Each takes some 20 kB."""
NUM_RESERVED = 32
RESERVED_HEAD_S = 2.0
"""How long a reserved connection may take to send its request."""
LOG_INTERVAL_S = 10.0
UNREAD_S = 60.0
"""A client that takes nothing of its answer for so long is cut off, its request cancelled."""
MAX_UNREAD_BYTES = 256 * 2**20
"""Unread answers in a gateway; beyond it the client that read nothing for longest is cut off."""
CHECK_S = 0.5
CAUSES = {
    "address": "one address has half of the connections; its oldest idle one is closed",
    "total": "there are as many as there may be; the oldest idle one is closed",
    "reserved": f"{NUM_RESERVED} beyond the limit wait for health or metrics",
    "head": "a client took longer than 20 s for the head of a request",
    "body": "a client took longer than 60 s for a MiB of the body of a request",
    "size": "the head of a request was longer than 64 KiB, or had too many fields",
    "drain": "a client went on sending a request that was answered already",
    "protocol": "a client sent what is no HTTP, or not served",
}
"""Why connections are cut, by the label of CONNECTIONS_CUT: for the log."""


class Connections:
    """The connections of one gateway, and their bounds.

    Attributes:
        open: all of them, with those that are inherited, which are not counted.
        regular, reserved: those within the limits, and those for health and metrics.
        num_by_address: number of the regular ones.
        idle: those of both that have no request; those that have waited longest come first.
        num_cuts: cuts since the last log line, by their cause (CAUSES).
    """

    def __init__(self) -> None:
        self.max_connections = default_max_connections()
        self.max_per_address = -(-self.max_connections // 2)
        self.open: set[Connection] = set()
        self.regular: set[Connection] = set()
        self.reserved: set[Connection] = set()
        self.num_by_address: Counter[str] = Counter()
        self.idle: OrderedDict[Connection, None] = OrderedDict()
        self.num_cuts: Counter[str] = Counter()
        self.logged_s: dict[str, float] = {}

    def let_in(self, connection: Connection) -> bool:
        """Count a new, idle connection; if a limit is reached, close an older idle one for it. Returns
        whether it is within the limits: if not, it is reserved for health and metrics.
        """
        address, idle = connection.address, (one for one in self.idle if one in self.regular)
        if self.num_by_address[address] >= self.max_per_address:
            self.make_room("address", (one for one in idle if one.address == address))
        elif len(self.regular) >= self.max_connections:
            self.make_room("total", idle)
        self.idle[connection] = None
        if self.num_by_address[address] < self.max_per_address and len(self.regular) < self.max_connections:
            self.regular.add(connection)
            self.num_by_address[address] += 1
            return True
        self.reserved.add(connection)
        if len(self.reserved) > NUM_RESERVED:
            self.make_room("reserved", (one for one in self.idle if one in self.reserved))
        return False

    def make_room(self, cause: str, idle: Iterable[Connection]) -> None:
        """Close the one that has waited longest, if there is one."""
        self.count_cut(cause)
        if (oldest := next(iter(idle), None)) is not None:
            self.close(oldest)
            oldest.transport.close()

    def close(self, connection: Connection) -> None:
        """Count a connection no more."""
        self.set_busy(connection)
        if connection in self.regular:
            self.regular.remove(connection)
            self.num_by_address[connection.address] -= 1
            if not self.num_by_address[connection.address]:
                del self.num_by_address[connection.address]
        self.reserved.discard(connection)

    def set_busy(self, connection: Connection) -> None:
        """Note that a connection has a request: it is not closed before the answer."""
        self.idle.pop(connection, None)

    def set_idle(self, connection: Connection) -> None:
        """Note that a connection waits for its next request; a reserved one is closed instead."""
        if connection in self.regular:
            self.idle[connection] = None
        else:
            connection.transport.close()

    def count_cut(self, cause: str) -> None:
        """Count that a connection is cut, and log it; at most one line per cause and LOG_INTERVAL_S."""
        catalogue.CONNECTIONS_CUT.add(1, cause)
        self.num_cuts[cause] += 1
        now_s = time.monotonic()
        if now_s - self.logged_s.get(cause, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self.logged_s[cause] = now_s
            log.warning(
                "connections are cut off: %s (%d since the last such line)",
                CAUSES[cause],
                self.num_cuts.pop(cause),
            )

    # --- what clients do not read ---------------------------------------------------------------------------

    async def watch(self) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(until_beat(CHECK_S))
            await self.check_time()
            self.check_bytes()

    async def check_time(self) -> None:
        pace = Pace()
        for connection in [*self.open]:
            if connection.is_half_closed and is_reset(connection.transport.get_extra_info("socket")):
                connection.transport.abort()  # it is not read from, so asyncio does not notice
                continue
            connection.check(time.monotonic())
            if time.monotonic() - connection.taken_s > UNREAD_S and connection in self.open:
                self.cut(connection, "timeout", f"it took nothing for {UNREAD_S:g} s")
            await pace.step(0)

    def check_bytes(self) -> None:
        held = [connection for connection in self.open if connection.num_bytes]
        total = sum(connection.num_bytes for connection in held)
        for connection in sorted(held, key=lambda connection: connection.taken_s):
            if total <= MAX_UNREAD_BYTES:
                return
            total -= connection.num_bytes
            self.cut(connection, "bytes", f"unread answers held more than {MAX_UNREAD_BYTES}")

    def cut(self, connection: Connection, reason: str, why: str) -> None:
        """Cut a connection at once, and drop what waits for its client."""
        names = ", ".join(reader.answer.request_id for reader in connection.readers) or "none"
        text = "a client is cut off with %d bytes unread: %s (request: %s)"
        log.warning(text, connection.num_bytes, why, names)
        catalogue.UNREAD_CUT.add(1, reason)
        self.open.discard(connection)
        connection.transport.abort()


def raise_file_limit() -> None:
    """Raise the process's limit of open files to the highest that it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def default_max_connections() -> int:
    """Most open connections: as many as there are descriptors for, but no more than
    DEFAULT_CONNECTIONS.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return DEFAULT_CONNECTIONS
    return max(1, min(DEFAULT_CONNECTIONS, files - OTHER_FILES - NUM_RESERVED))


async def serve_reserved(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve health and metrics on a reserved connection, and refuse everything else."""
    served = app
    if scope["path"] not in PROBES:
        why = "this gateway has too many connections (half of all for one address; `ulimit -n` bounds them)"
        error = ApiError(503, "too_many_connections", why, retry_after_s=1)
        served = error_response(error, errors_of(scope), {"connection": "close"})
    await served(scope, receive, send)


# --- turns --------------------------------------------------------------------------------------------------
# New connections are taken at once, and served in turn by their addresses. The kernel has one queue for all:
# in it a client would wait until every connection of a flood from another address has been served.


BACKLOG = 2048
MAX_ACCEPTED = 256
"""Connections taken from the kernel in one turn of the event loop; each takes some microseconds."""
MAX_BEGUN = 4
"""Connections that begin in one turn; the first request of each may take a millisecond or more."""
MAX_WAITING = 4096
FULL_PAUSE_S = 0.1
"""How long nothing is accepted when the process has no descriptor left."""


class Acceptor:
    """The listeners of a gateway, and the connections that have not begun.

    Args:
        begin: serves a connection.

    Attributes:
        turns: of the connections that wait, by their addresses.
        beginning: tasks that wait for their turn, or `begin`.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        begin: Callable[[socket.socket], Coroutine[Any, Any, None]],
    ) -> None:
        self.listeners = [*listeners]
        self.begin = begin
        self.turns = Turns(MAX_BEGUN)
        self.beginning: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Listen, and take connections as they come."""
        for listener in self.listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self.watch(listener)

    def watch(self, listener: socket.socket) -> None:
        if listener in self.listeners:
            asyncio.get_running_loop().add_reader(listener, self.accept, listener)

    def close(self) -> None:
        """Stop listening, and let all accepted connections begin: closing a listener would reset those that
        are still in its queue.
        """
        loop = asyncio.get_running_loop()
        while self.listeners:
            listener = self.listeners.pop()
            loop.remove_reader(listener)
            while self.accept(listener):
                pass
            listener.close()
        self.turns.give(self.turns.num_waiting)

    def accept(self, listener: socket.socket) -> int:
        """Take up to MAX_ACCEPTED connections that the kernel has accepted. Returns their number."""
        for number in range(MAX_ACCEPTED):
            try:
                connection, (address, *_) = listener.accept()
            except BlockingIOError:
                return number
            except ConnectionError:  # its client has gone
                continue
            except OSError:
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(FULL_PAUSE_S, self.watch, listener)
                return 0
            connection.setblocking(False)
            task = asyncio.create_task(self.serve(connection, self.turns.take(address)))
            self.beginning.add(task)
            task.add_done_callback(self.beginning.discard)
            if self.turns.num_waiting > MAX_WAITING:
                self.turns.drop_oldest()
        return MAX_ACCEPTED

    async def serve(self, connection: socket.socket, turn: asyncio.Future[None]) -> None:
        """Serve a connection when its turn comes. Beyond MAX_WAITING the longest queue loses its oldest."""
        try:
            await turn
        except asyncio.CancelledError:
            connection.close()
            raise
        await self.begin(connection)
