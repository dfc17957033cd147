"""Draining: what a gateway does from its first SIGTERM until it ends.

Where a socket keeper listens, it hands its answers over to other gateways, or to its own successor, and takes
no new connections. Else it refuses new requests, and ends when those that it has are finished. Those that are
not finished in time get an error.
"""

import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from api.errors import unavailable
from api.heir.keeper_channel import KeeperChannel

FIRST_REQUEST_S = 1.0


class Draining:
    """Whether the gateway drains, and until when at most (monotonic clock).

    Attributes:
        refuses: whether it refuses new requests.
        on_start: called once, when it begins.
        on_timeout: called once, when its time is over; it ends the requests that are left.
    """

    def __init__(
        self, on_start: Callable[[], None] = lambda: None, on_timeout: Callable[[], None] = lambda: None
    ) -> None:
        self.until_s: float | None = None
        self.refuses = False
        self.on_start = on_start
        self.on_timeout = on_timeout

    async def check(self) -> None:
        """Raises ApiError (503) while the gateway refuses new requests."""
        if self.refuses:
            raise unavailable("this gateway is shutting down")


class DrainingServer(uvicorn.Server):
    """A server that goes on listening while it drains, unless it hands over; uvicorn's own closes its sockets
    at the first signal, and a new request finds no server.
    """

    def __init__(
        self, config: uvicorn.Config, draining: Draining, timeout_s: float, channel: KeeperChannel
    ) -> None:
        super().__init__(config)
        self.draining = draining
        self.timeout_s = timeout_s
        self.channel = channel
        self.left_s: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.draining.until_s is None:
            self.draining.until_s = time.monotonic() + self.timeout_s
            self.draining.on_start()
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. Returns whether the server stops."""
        stops = await super().on_tick(counter)
        until_s = self.draining.until_s
        if until_s is None:
            return stops
        if self.channel.hand_over():
            self.leave()
        else:
            self.draining.refuses = True
        is_idle = not self.server_state.tasks and not self.newly_connected()
        is_late = time.monotonic() > until_s
        if is_late:
            self.draining.on_timeout()
        return stops or is_idle or is_late

    def leave(self) -> None:
        """Take no new connections, and no further request on those that are open."""
        if self.left_s is None:
            self.left_s = time.monotonic()
        for server in self.servers:
            server.close()
        for connection in {*self.server_state.connections} - self.newly_connected():
            connection.shutdown()

    def newly_connected(self) -> set[Any]:
        """Connections whose first request may be on its way; they get a second for it."""
        if self.left_s is None or time.monotonic() - self.left_s > FIRST_REQUEST_S:
            return set()
        open_now: set[Any] = {*self.server_state.connections}
        return {connection for connection in open_now if connection.cycle is None}
