"""Connection limits: how many connections a gateway has, in all and of one address.

Where a limit is reached, the connection that has waited longest for a request makes way for a new one: the
pool of a client opens another, and a client that opens thousands only loses them. Where all have requests, a
few more are kept for health and metrics; they get 503 for anything else.
"""

import logging
import resource
import time
from collections import Counter, OrderedDict
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import ApiError
from api.http.error_handlers import error_response
from common.metrics import catalogue
from common.settings.settings import Settings

log = logging.getLogger(__name__)

LIMITS = "limits"
"""Key in the server's state of ConnectionLimits."""
OTHER_FILES = 256
"""Descriptors of a gateway that are no connections of clients: brokers, listeners, files."""
MOST_CONNECTIONS = 16_384
"""By default; each takes some 20 kB."""
NUM_RESERVED = 32
RESERVED_HEAD_S = 2.0
"""How long a reserved connection may take to send its request."""
RESERVED_PATHS = ("/health", "/ping", "/metrics")
LOG_INTERVAL_S = 10.0


class LimitedConnection(Protocol):
    """What the limits need of a connection: its address, and a way to close it while it has no request."""

    address: str

    def close_unused(self) -> None: ...


class Unused:
    """Connections without a request, in the order in which they have waited for one."""

    def __init__(self) -> None:
        self.connections: OrderedDict[LimitedConnection, None] = OrderedDict()
        self.of_address: dict[str, OrderedDict[LimitedConnection, None]] = {}

    def add(self, connection: LimitedConnection) -> None:
        self.connections[connection] = None
        self.of_address.setdefault(connection.address, OrderedDict())[connection] = None

    def discard(self, connection: LimitedConnection) -> None:
        if connection in self.connections:
            del self.connections[connection]
            of_address = self.of_address[connection.address]
            del of_address[connection]
            if not of_address:
                del self.of_address[connection.address]

    def oldest(self, address: str | None = None) -> LimitedConnection | None:
        """The one that has waited longest, of all or of one address."""
        if address is None:
            return next(iter(self.connections), None)
        return next(iter(self.of_address.get(address, ())), None)


class ConnectionLimits:
    """The connections of one gateway, and their bounds.

    Attributes:
        timeouts_s: how long a client may take for each part of a request.
        within, beyond: the open connections within the limits, and those that are reserved.
        num_of_address: of those within.
        unused, unused_beyond: those of each that have no request.
        refusals: how often a limit has held since that was logged, by its name.
    """

    def __init__(self, settings: Settings) -> None:
        self.timeouts_s = {"head": settings.head_timeout_s, "body": settings.body_timeout_s}
        self.max_head_bytes = settings.max_head_bytes
        self.max_connections = settings.max_connections or default_max_connections()
        self.max_of_address = settings.max_connections_per_address or -(-self.max_connections // 2)
        self.within: set[LimitedConnection] = set()
        self.beyond: set[LimitedConnection] = set()
        self.num_of_address: Counter[str] = Counter()
        self.unused = Unused()
        self.unused_beyond = Unused()
        self.refusals: Counter[str] = Counter()
        self.logged_s: dict[str, float] = {}

    # --- opening and closing --------------------------------------------------------------------------------

    def open(self, connection: LimitedConnection) -> bool:
        """Count a new connection; where a limit is reached, in place of an older one without a request.
        Returns whether it is within the limits: if not, it is reserved for health and metrics.
        """
        address = connection.address
        if self.num_of_address[address] >= self.max_of_address:
            self.make_way("address", self.unused.oldest(address))
        elif len(self.within) >= self.max_connections:
            self.make_way("total", self.unused.oldest())
        if self.num_of_address[address] < self.max_of_address and len(self.within) < self.max_connections:
            self.within.add(connection)
            self.num_of_address[address] += 1
            self.unused.add(connection)
            return True
        if len(self.beyond) >= NUM_RESERVED:
            self.make_way("reserved", self.unused_beyond.oldest() or connection)
        self.beyond.add(connection)
        self.unused_beyond.add(connection)
        return False

    def make_way(self, limit: str, unused: LimitedConnection | None) -> None:
        self.refuse(limit)
        if unused is not None:
            self.close(unused)
            unused.close_unused()

    def close(self, connection: LimitedConnection) -> None:
        """Count a connection no more."""
        self.use(connection)
        if connection in self.within:
            self.within.remove(connection)
            self.num_of_address[connection.address] -= 1
            if not self.num_of_address[connection.address]:
                del self.num_of_address[connection.address]
        self.beyond.discard(connection)

    # --- requests -------------------------------------------------------------------------------------------

    def use(self, connection: LimitedConnection) -> None:
        """Note that a connection has a request: it is not closed before the answer."""
        self.unused.discard(connection)
        self.unused_beyond.discard(connection)

    def unuse(self, connection: LimitedConnection) -> None:
        """Note that it waits for its next request; a reserved one has only one."""
        if connection in self.within:
            self.unused.add(connection)
        else:
            connection.close_unused()

    # --- refusals -------------------------------------------------------------------------------------------

    def refuse(self, limit: str) -> None:
        """Count that a limit has held, and log those of a limit together: a flood is no flood of lines."""
        catalogue.CONNECTIONS_CUT.add(1, limit)
        self.refusals[limit] += 1
        now_s = time.monotonic()
        if now_s - self.logged_s.get(limit, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self.logged_s[limit] = now_s
            log.warning(
                "connections are cut off: %s (%d since the last such line)",
                WORDS[limit],
                self.refusals.pop(limit),
            )


WORDS = {
    "address": "one address has MAX_CONNECTIONS_PER_ADDRESS; its oldest without a request makes way",
    "total": "there are MAX_CONNECTIONS; the oldest without a request makes way",
    "reserved": f"{NUM_RESERVED} beyond MAX_CONNECTIONS wait for health or metrics",
    "head": "a client took longer than HEAD_TIMEOUT_S for the head of a request",
    "body": "a client took longer than BODY_TIMEOUT_S for the body of a request",
    "size": "the head of a request was longer than MAX_HEAD_BYTES, or had too many fields",
    "drain": "a client went on sending a request that was answered already",
    "protocol": "a client sent what is no HTTP, or not served",
}
"""What each limit means, in a line of the log."""


def raise_file_limit() -> None:
    """Have as many descriptors as the process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def default_max_connections() -> int:
    """The default of MAX_CONNECTIONS: as many as the process has descriptors for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, files - OTHER_FILES - NUM_RESERVED))


async def serve_reserved(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve health and metrics on a reserved connection, and refuse all else."""
    served = app
    if scope["path"] not in RESERVED_PATHS:
        why = "this gateway has too many connections (MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS)"
        error = ApiError(503, "too_many_connections", why, retry_after_s=1)
        served = error_response(error, scope["path"], {"connection": "close"})
    await served(scope, receive, send)
