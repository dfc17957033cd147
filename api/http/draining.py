"""Draining: at the first SIGTERM a gateway refuses new requests, and ends when those it has are finished."""

import time
from types import FrameType

import uvicorn

from api.errors import unavailable


class Draining:
    """Whether the gateway drains, and until when at most (monotonic clock)."""

    def __init__(self) -> None:
        self.until_s: float | None = None

    async def check(self) -> None:
        """Raises ApiError (503) while the gateway drains."""
        if self.until_s is not None:
            raise unavailable("this gateway is shutting down")


class DrainingServer(uvicorn.Server):
    """A server that goes on listening while it drains; uvicorn's own closes its sockets at the first signal,
    and a new request finds no server.
    """

    def __init__(self, config: uvicorn.Config, draining: Draining, timeout_s: float) -> None:
        super().__init__(config)
        self.draining = draining
        self.timeout_s = timeout_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.draining.until_s is None:
            self.draining.until_s = time.monotonic() + self.timeout_s
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. Returns whether the server stops."""
        stops = await super().on_tick(counter)
        until_s = self.draining.until_s
        is_drained = until_s is not None and (not self.server_state.tasks or time.monotonic() > until_s)
        return stops or is_drained
