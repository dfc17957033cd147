"""Whether the engine comes on with the rows that it holds."""

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_worker.agent.agent import Agent

CHECK_INTERVAL_S = 1.0
MANY_STEPS = 20


class EngineStuck(Exception):
    """The engine holds rows, may run, and completed no step for too long."""


class Watchdog:
    """Looks after the engine of `agent`.

    Attributes:
        moved_s: monotonic time of the last step, or of the start of the first row.
    """

    def __init__(self, agent: "Agent") -> None:
        self.agent = agent
        self.moved_s = 0.0

    def moved(self) -> None:
        self.moved_s = time.monotonic()

    async def look_for_ever(self) -> None:
        """Raises EngineStuck."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            waited_s = time.monotonic() - self.moved_s
            if (
                self.agent.table.rows
                and self.agent.step < self.agent.until
                and waited_s > self.step_timeout_s
            ):
                raise EngineStuck(f"no step for {waited_s:.0f} s (STEP_TIMEOUT_S)")

    @property
    def step_timeout_s(self) -> float:
        """A step of many prompt tokens may take long: as long as many such steps should, by what warm-up
        found.
        """
        agent = self.agent
        tokens = agent.prefill_tokens + len(agent.table.rows)
        return max(agent.settings.step_timeout_s, MANY_STEPS * tokens * agent.engine.token_ms / 1e3)
