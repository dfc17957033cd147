"""WorkerPace: how fast a worker goes, as its reports say: steps, ends of rows, and the trip of a grant.

A grant's round trip begins at the step at which a report is due, and ends when the engine has the grant.
"""

import math
from dataclasses import dataclass, field

from batcher.scheduling.step_times import StepTimes
from common.messages.plan import Report

MEMORY = 0.99
"""What is left of former figures after one step, or one round trip."""
NEWEST = 0.1
"""Share of the newest round trip in their mean."""
LAUNCHED_STEPS = 2
"""A grant takes effect at a step boundary, and a step is launched before the one before it is read."""
LEAST_HORIZON = 32
"""So many steps are granted, however soon a grant comes: reports and plans are seldom due."""
AHEAD = 8
"""More than LEAST_HORIZON is granted only as far as all rows together get at most one part in AHEAD of the
cache for it.
"""


def horizon(most: int, trip_steps: int, slots_per_row: int) -> int:
    """Return how many steps are granted ahead, at most `most`. The next grant is asked for when half of them
    are left, and comes within `trip_steps`.
    """
    needed = 2 * (trip_steps + LAUNCHED_STEPS)
    return min(most, max(LEAST_HORIZON, min(needed, slots_per_row // AHEAD)))


@dataclass(slots=True)
class WorkerPace:
    """How fast one worker goes.

    Attributes:
        times: of steps.
        trip_ms: a round trip, on average.
        late_trip_ms: one that few exceed: the longest, which fades with each round trip after it.
        late_trip_steps: that in steps without prefill; 0 while it is not known.
        steps, ended: sums over the last steps: how many they are, and the rows that ended in them.
    """

    times: StepTimes = field(default_factory=StepTimes)
    trip_ms: float = 0.0
    late_trip_ms: float = 0.0
    late_trip_steps: int = 0
    steps: float = 0.0
    ended: float = 0.0

    def add(self, report: Report, num_steps: int) -> None:
        """Learn from a report, `num_steps` behind the one before it."""
        self.times.add(report.step_times)
        for ms in report.round_trips:
            if 0 < ms < math.inf:
                self.trip_ms += (ms - self.trip_ms) * (NEWEST if self.trip_ms else 1)
                self.late_trip_ms = max(ms, MEMORY * self.late_trip_ms)
        self.late_trip_steps = math.ceil(self.steps_in(self.late_trip_ms))
        memory = MEMORY**num_steps
        self.steps = memory * self.steps + num_steps
        self.ended = memory * self.ended + len(report.ended)

    def steps_in(self, ms: float) -> float:
        """How many steps without prefill take so long; 0 while that is not known."""
        step_ms = self.times.step_ms
        return ms / step_ms if step_ms else 0.0

    @property
    def ends_per_trip(self) -> float:
        """Rows that end until the batcher's answer to an end is there, on average."""
        per_step = self.ended / self.steps if self.steps else 0.0
        return per_step * (self.steps_in(self.trip_ms) + LAUNCHED_STEPS)
