"""Pace of a worker, as its reports tell it: times of steps, ends of rows, and round trips of grants.

The horizon of grants and the tokens of prefill beside decode follow from it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.messages.plan import Report

STEP_TIME_MEMORY = 0.98
"""What is left of the sums in `StepTimes` after one step."""
PACE_MEMORY = 0.99
"""What is left of the figures in `WorkerPace` after one step, or one round trip."""
NEWEST_TRIP = 0.1
"""Share of the newest round trip in their mean."""
LEAST_PREFILL_SHARE = 0.25
"""Least time of prefill in a step, as a share of a decode step's time. Without it prompts would starve where
decode alone misses the target.
"""
LEARNT_DECODE_STEPS = 3.0
"""A learnt target is so many times the time of decode: a prompt that takes several steps then takes half as
long again as it would alone.
"""
LEAST_LEARNT_MS = 100.0
"""A learnt target is never shorter: nobody sees a shorter gap in a text that appears."""
LEAST_PREFILL_TOKENS = 16
"""Least prompt tokens of a step that computes any: fewer take nearly as long."""
LAUNCHED_STEPS = 2
"""A grant takes effect at a step boundary, and a step is launched before the one before it is read."""
LEAST_HORIZON = 32
"""Steps granted even where a grant comes at once, so that reports and plans are seldom due."""
CACHE_PARTS = 8
"""More than LEAST_HORIZON is granted only while the slots for it, of all rows, are one part in CACHE_PARTS of
the cache.
"""


@dataclass(slots=True)
class StepTimes:
    """Sums over the last steps; earlier steps count less and less.

    They are sums because the time that a few tokens add to one step is less than its noise.

    Attributes:
        decode_steps, decode_ms: steps that computed no prompt, and their time.
        tokens, added_ms: prompt tokens, and the time that they added to their steps.
    """

    decode_steps: float = 0.0
    decode_ms: float = 0.0
    tokens: float = 0.0
    added_ms: float = 0.0

    def add(self, step_times: Iterable[tuple[int, int, int, float]]) -> None:
        """Learn from a report's `step_times`."""
        for steps, decoding, tokens, ms in step_times:
            if steps < 1 or tokens < 0 or ms <= 0:
                continue
            memory = STEP_TIME_MEMORY**steps
            if tokens:
                self.tokens = memory * self.tokens + tokens
                self.added_ms = memory * self.added_ms + ms - decoding * self.step_ms
            else:
                self.decode_steps = memory * self.decode_steps + steps
                self.decode_ms = memory * self.decode_ms + ms

    @property
    def step_ms(self) -> float:
        """Time of a step without prefill; 0 while it is not known."""
        return self.decode_ms / self.decode_steps if self.decode_steps else 0.0

    def prefill_tokens(self, target_ms: float | None, most: int) -> int:
        """Return how many prompt tokens, at most `most`, a step in which rows decode may compute.

        Args:
            target_ms: how long the step may take; 0 sets no bound, None learns it.
        """
        step_ms = self.step_ms
        if target_ms == 0 or not step_ms or self.added_ms <= 0:
            return most
        if target_ms is None:
            target_ms = max(LEAST_LEARNT_MS, LEARNT_DECODE_STEPS * step_ms)
        return min(most, max(self.least_tokens, self.tokens_in(target_ms - step_ms)))

    @property
    def least_tokens(self) -> int:
        """Least prompt tokens of a step that computes any."""
        return max(LEAST_PREFILL_TOKENS, self.tokens_in(LEAST_PREFILL_SHARE * self.step_ms))

    def tokens_in(self, ms: float) -> int:
        """Return how many prompt tokens are computed in `ms`; 0 while it is not known."""
        return int(ms * self.tokens / self.added_ms) if self.added_ms > 0 else 0


def horizon(most: int, trip_steps: int, slots_per_row: int) -> int:
    """Return how many steps are granted ahead, at most `most`. A report asks for the next grant when half of
    them are left, and it comes within `trip_steps`.
    """
    needed = 2 * (trip_steps + LAUNCHED_STEPS)
    return min(most, max(LEAST_HORIZON, min(needed, slots_per_row // CACHE_PARTS)))


@dataclass(slots=True)
class WorkerPace:
    """How fast one worker goes.

    A grant's round trip begins at the step at which a report is due, and ends when the engine has the grant.

    Attributes:
        trip_ms: mean round trip.
        late_trip_ms: a round trip that few exceed: the longest one, which fades with each later one.
        late_trip_steps: the same in steps without prefill; 0 while it is not known.
        steps, ended: sums over the last steps: their number, and the rows that ended in them.
    """

    times: StepTimes = field(default_factory=StepTimes)
    trip_ms: float = 0.0
    late_trip_ms: float = 0.0
    late_trip_steps: int = 0
    steps: float = 0.0
    ended: float = 0.0

    def add(self, report: Report, num_steps: int) -> None:
        """Learn from a report that comes `num_steps` after the last one."""
        self.times.add(report.step_times)
        for ms in report.round_trips:
            if 0 < ms < math.inf:
                self.trip_ms += (ms - self.trip_ms) * (NEWEST_TRIP if self.trip_ms else 1)
                self.late_trip_ms = max(ms, PACE_MEMORY * self.late_trip_ms)
        self.late_trip_steps = math.ceil(self.steps_in(self.late_trip_ms))
        memory = PACE_MEMORY**num_steps
        self.steps = memory * self.steps + num_steps
        self.ended = memory * self.ended + len(report.ended)

    def steps_in(self, ms: float) -> float:
        """Return how many steps without prefill take `ms`; 0 while it is not known."""
        step_ms = self.times.step_ms
        return ms / step_ms if step_ms else 0.0

    @property
    def ends_per_trip(self) -> float:
        """Mean number of rows that end before the batcher's answer to an end arrives."""
        per_step = self.ended / self.steps if self.steps else 0.0
        return per_step * (self.steps_in(self.trip_ms) + LAUNCHED_STEPS)
