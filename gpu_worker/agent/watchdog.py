"""Watchdog: ends the worker when its engine hangs."""

import asyncio
import time
from collections.abc import Callable

CHECK_INTERVAL_S = 1.0


class EngineStuck(Exception):
    """The engine holds rows, may run, and completed no step for too long."""


class Watchdog:
    """Raises EngineStuck once `is_busy` and no `reset` came for `timeout_s()` seconds.

    Attributes:
        reset_s: monotonic time of the last reset.
    """

    def __init__(self, timeout_s: Callable[[], float], is_busy: Callable[[], bool]) -> None:
        self.timeout_s = timeout_s
        self.is_busy = is_busy
        self.reset_s = time.monotonic()

    def reset(self) -> None:
        self.reset_s = time.monotonic()

    async def run(self) -> None:
        """Checks once a second. Raises EngineStuck."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.check()

    def check(self) -> None:
        """Raises EngineStuck."""
        waited_s = time.monotonic() - self.reset_s
        if self.is_busy() and waited_s > self.timeout_s():
            raise EngineStuck(f"no step for {waited_s:.0f} s (STEP_TIMEOUT_S)")
