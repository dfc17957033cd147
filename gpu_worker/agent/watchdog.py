"""Watchdog: ends the worker when its engine hangs."""

import asyncio
import time
from collections.abc import Callable

from common.process.event_loop import until_beat

CHECK_INTERVAL_S = 1.0
MAX_COUNTED_S = 2.0
"""The longest time that one check counts. After a longer one, this process was stopped or waited for a core,
and has not read yet what the engine sent.
"""
MIN_SHARE = 0.1
"""At least this share of the time counts, however starved the engine is: so a busy loop is found in the
end.
"""


class EngineStuck(Exception):
    """The engine holds rows and may run, or has a command, but has completed nothing for too long."""


class Watchdog:
    """Raises EngineStuck after `timeout_s()` busy seconds without a `reset`. Time in which the engine's
    threads waited for a core does not count: on a loaded machine a step may take a hundred times as long, and
    a restart would make it longer still.

    Attributes:
        run_delay_s: how long the engine's threads have waited for a core since they started.
        stuck_s: seconds counted since the last reset.
        checked_s, delay_s: monotonic time of the last check, and `run_delay_s()` then.
    """

    def __init__(
        self, timeout_s: Callable[[], float], is_busy: Callable[[], bool], run_delay_s: Callable[[], float]
    ) -> None:
        self.timeout_s = timeout_s
        self.is_busy = is_busy
        self.run_delay_s = run_delay_s
        self.stuck_s = 0.0
        self.checked_s = time.monotonic()
        self.delay_s = 0.0

    def reset(self) -> None:
        self.stuck_s = 0.0

    async def run(self) -> None:
        """Check once a second. Raises EngineStuck."""
        while True:
            await asyncio.sleep(until_beat(CHECK_INTERVAL_S))
            self.check()

    def check(self) -> None:
        """Raises EngineStuck."""
        now_s, delay_s = time.monotonic(), self.run_delay_s()
        elapsed_s = min(now_s - self.checked_s, MAX_COUNTED_S)
        starved_s = min(delay_s - self.delay_s, (1 - MIN_SHARE) * elapsed_s)
        self.checked_s = now_s
        self.delay_s = delay_s
        self.stuck_s = self.stuck_s + elapsed_s - max(0.0, starved_s) if self.is_busy() else 0.0
        if self.stuck_s > self.timeout_s():
            raise EngineStuck(f"no step and no answer for {self.stuck_s:.0f} s (STEP_TIMEOUT_S)")
