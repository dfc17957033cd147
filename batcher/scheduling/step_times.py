"""StepTimes: how long a worker's steps take, as its reports say, and how much prefill fits beside decode."""

from collections.abc import Iterable
from dataclasses import dataclass

MEMORY = 0.98
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
            memory = MEMORY**steps
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
