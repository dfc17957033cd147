"""What a worker counts: its steps, what starts in them, and what the agent does for them. Nothing is counted
token by token.
"""

import time
from collections.abc import Sequence

from common.metrics import catalogue
from gpu_worker.protocol import Grant, StepResult


class BatchMetrics:
    """Stands at the door, where all of it passes.

    Attributes:
        prefilling: rows that started and whose prompt is not computed yet.
        running: rows that decode.
        steps: those that the agent is busy with since `took_s`; none while it waits for the next.
    """

    def __init__(self) -> None:
        self.prefilling: set[int] = set()
        self.running: set[int] = set()
        self.steps: Sequence[StepResult] = ()
        self.took_s = 0.0

    @property
    def method(self) -> str:
        """Of the step that runs; one that computes any prompt is a prefill."""
        return "prefill" if self.prefilling else "decode"

    def granted(self, grant: Grant, began_s: float) -> None:
        """The engine was sent a grant."""
        if not grant.starts:
            return
        catalogue.BATCH_NEXT_SIZE.observe(len(grant.starts))
        if self.running:
            catalogue.BATCH_CONCAT.add(1, "chunking")
            catalogue.BATCH_CONCAT_DURATION.observe(time.perf_counter() - began_s, "decode")
        self.prefilling.update(start.row for start in grant.starts)

    def took(self, steps: Sequence[StepResult]) -> None:
        """The agent has steps, and is busy with them until it waits for the next."""
        self.steps, self.took_s = steps, time.perf_counter()

    def waits(self) -> None:
        """The agent is done with the last steps."""
        steps, self.steps = self.steps, ()
        if not steps:
            return
        text_s = (time.perf_counter() - self.took_s) / len(steps)
        forwards: dict[str, list[float]] = {"prefill": [], "decode": []}
        for step in steps:
            if step.duration_ms:
                forwards[self.method].append(step.duration_ms / 1000)
            self.move(step)
        for method, forwards_s in forwards.items():
            if forwards_s:
                self.count(method, forwards_s, text_s)
        catalogue.TOKENS.add(sum(step.num_samples for step in steps))

    def count(self, method: str, forwards_s: Sequence[float], text_s: float) -> None:
        """Steps of one method, each of which took the agent `text_s`."""
        catalogue.BATCH_COUNT.add(len(forwards_s), method)
        catalogue.BATCH_SUCCESS.add(len(forwards_s), method)
        catalogue.BATCH_FORWARD.observe_all(forwards_s, method)
        catalogue.BATCH_DECODE.observe(text_s, method, times=len(forwards_s))
        catalogue.BATCH_DURATION.observe_all([forward_s + text_s for forward_s in forwards_s], method)

    def move(self, step: StepResult) -> None:
        for row, kv_len in step.prefilled:
            catalogue.PREFILLED_TOKENS.add(kv_len)
            self.prefilling.discard(row)
            self.running.add(row)
        for row, _, _ in step.ended:
            self.prefilling.discard(row)
            self.running.discard(row)

    def failed(self) -> None:
        """The engine ended under its rows."""
        if self.prefilling or self.running:
            catalogue.BATCH_COUNT.add(1, self.method)
            catalogue.BATCH_FAILURE.add(1, self.method)
