"""WorkerPace: how fast a worker goes, as its reports say: steps, ends of rows, and the trip of a grant.

A grant's round trip begins at the step at which a report is due, and ends when the engine has the grant.

StepTimes: how long a worker's steps take, as its reports say, and how much prefill fits beside decode.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.messages.plan import Report

STEP_TIME_MEMORY = 0.98
"""What is left of the former sums after one step."""
LEAST_SHARE = 0.25
"""Prefill has so much of a decode step's time at least, so that prompts do not starve where decode alone
misses the target.
"""
LEAST_TOKENS = 16
"""A step that computes any of a prompt computes so many tokens: fewer cost nearly as much."""


@dataclass(slots=True)
class StepTimes:
    """Sums over the last steps, of which the earlier ones count ever less.

    Sums, not means of each step's own: what a few tokens add is less than the noise of a step.

    Attributes:
        decode_steps, decode_ms: steps that computed no prompt, and their time.
        tokens, added_ms: tokens of prompts, and what they added to the time of their steps.
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
        """What a step takes that computes no prompt; 0 while that is not known."""
        return self.decode_ms / self.decode_steps if self.decode_steps else 0.0

    def prefill_tokens(self, target_ms: float, most: int) -> int:
        """How many tokens of prompts a step in which rows decode may have, to take `target_ms`; 0 sets
        no bound.
        """
        step_ms = self.step_ms
        if target_ms == 0 or not step_ms or self.added_ms <= 0:
            return most
        prefill_ms = max(target_ms - step_ms, LEAST_SHARE * step_ms)
        return min(most, max(LEAST_TOKENS, int(prefill_ms * self.tokens / self.added_ms)))


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
