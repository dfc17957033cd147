"""Batch metrics of a worker: its steps, the rows that start in them, and the agent's time for each step.
Steps are counted several at once, never token by token.
"""

import time
from collections import Counter
from collections.abc import Sequence

from common.messages.plan import Plan
from common.metrics import catalogue
from gpu_worker.protocol import StepResult

COUNTED_AT_ONCE = 64
"""Steps that are counted together at most: the code that counts is not in the processor's caches."""


class BatchMetrics:
    """Counts plans and steps as they pass the engine client.

    Attributes:
        prefilling: rows whose prompt is not computed yet → tokens whose KV they found in the cache.
        running: rows that decode.
        steps, handled_s: steps that are not counted yet, and the agent's time for them.
    """

    def __init__(self) -> None:
        self.prefilling: dict[int, int] = {}
        self.running: set[int] = set()
        self.steps: list[StepResult] = []
        self.handled_s = 0.0

    def on_plan(self, plan: Plan, started_s: float) -> None:
        """Count a plan that was sent; `started_s` is when its sending began."""
        if not plan.starts:
            return
        self.count_steps()
        catalogue.BATCH_NEXT_SIZE.observe(len(plan.starts))
        if self.running:
            catalogue.BATCH_CONCAT_DURATION.observe(time.perf_counter() - started_s, "decode")
        self.prefilling.update((start.row, start.num_cached) for start in plan.starts)

    def on_steps(self, steps: Sequence[StepResult], handled_s: float) -> None:
        """Note steps, which took the agent `handled_s` together."""
        self.steps += steps
        self.handled_s += handled_s
        if len(self.steps) >= COUNTED_AT_ONCE:
            self.count_steps()

    def count_steps(self) -> None:
        """Count the steps that were noted since the last call."""
        steps, self.steps = self.steps, []
        if not steps:
            return
        text_s, self.handled_s = self.handled_s / len(steps), 0.0
        forwards: dict[str, list[float]] = {"prefill": [], "decode": []}
        for step in steps:
            if step.duration_ms:
                forwards[method_of(step)].append(step.duration_ms / 1000)
            self.move_rows(step)
            if step.proposals:
                count_proposals(step)
        for method, forwards_s in forwards.items():
            if forwards_s:
                self.count(method, forwards_s, text_s)
        catalogue.TOKENS.add(sum(step.num_samples + step.num_beams for step in steps))
        if num_plain := sum(step.num_samples for step in steps if not step.proposals):
            catalogue.SKIPPED_TOKENS.observe(0, times=num_plain)

    def count(self, method: str, forwards_s: Sequence[float], text_s: float) -> None:
        """Count steps of one method, each of which took the agent `text_s`."""
        catalogue.BATCH_COUNT.add(len(forwards_s), method)
        catalogue.BATCH_SUCCESS.add(len(forwards_s), method)
        catalogue.BATCH_FORWARD.observe_all(forwards_s, method)
        catalogue.BATCH_DECODE.observe(text_s, method, times=len(forwards_s))
        catalogue.BATCH_DURATION.observe_all([forward_s + text_s for forward_s in forwards_s], method)

    def move_rows(self, step: StepResult) -> None:
        for row, kv_len in step.prefilled:
            catalogue.PREFILLED_TOKENS.add(kv_len - self.prefilling.pop(row, 0))
            self.running.add(row)
        for row, _, _ in step.ended:
            self.prefilling.pop(row, None)
            self.running.discard(row)

    def on_failure(self) -> None:
        """Count the batch that the engine lost when it died. Its method is a guess: rows may stand by."""
        self.count_steps()
        method = "prefill" if self.prefilling else "decode"
        if self.prefilling or self.running:
            catalogue.BATCH_COUNT.add(1, method)
            catalogue.BATCH_FAILURE.add(1, method)


def count_proposals(step: StepResult) -> None:
    """Count a step that checked proposed tokens: each row has one token of the step's own, and those accepted
    beside it.
    """
    num_tokens = Counter(row for row, *_ in step.sampled)
    for method, number, num_right in step.proposals:
        catalogue.PROPOSALS.add(1, method)
        catalogue.PROPOSED_TOKENS.add(number, method)
        catalogue.ACCEPTED_TOKENS.add(num_right, method)
        for position in range(num_right):
            catalogue.ACCEPTED_AT.add(1, str(position))
    catalogue.SKIPPED_TOKENS.observe_all([number - 1 for number in num_tokens.values()])


def method_of(step: StepResult) -> str:
    """The kind of a step: one that computes any prompt is a prefill."""
    return "prefill" if step.prefill_tokens or step.prefilled else "decode"
