"""What a worker counts: its steps, what starts in them, and what the agent does for each. All of it per step, nothing per token."""

import time

from common import metrics
from gpu_worker.door import Grant, Step


class Meter:
    """Stands at the door, where all of it passes.

    Attributes:
        prefilling: rows that started and whose prompt is not computed yet.
        running: rows that decode.
        step: the step that the agent is busy with since `took_s`; None while it waits for the next one.
    """

    def __init__(self) -> None:
        self.prefilling: set[int] = set()
        self.running: set[int] = set()
        self.step: Step | None = None
        self.took_s = 0.0

    @property
    def method(self) -> str:
        """Of the step that runs; one that computes any prompt is a prefill."""
        return "prefill" if self.prefilling else "decode"

    def granted(self, grant: Grant, began_s: float) -> None:
        """The engine was sent a grant."""
        if not grant.starts:
            return
        metrics.BATCH_NEXT_SIZE.observe(len(grant.starts))
        if self.running:
            metrics.BATCH_CONCAT.add(1, "chunking")
            metrics.BATCH_CONCAT_DURATION.observe(time.perf_counter() - began_s, "decode")
        self.prefilling.update(start.row for start in grant.starts)

    def took(self, step: Step) -> None:
        """The agent has a step, and is busy with it until it waits for the next one."""
        self.step, self.took_s = step, time.perf_counter()

    def waits(self) -> None:
        """The agent is done with the last step."""
        step, self.step = self.step, None
        if step is None:
            return
        if step.duration_ms:
            self.count(step, self.method, time.perf_counter() - self.took_s)
        self.move(step)

    def count(self, step: Step, method: str, text_s: float) -> None:
        forward_s = step.duration_ms / 1000
        metrics.BATCH_COUNT.add(1, method)
        metrics.BATCH_SUCCESS.add(1, method)
        metrics.BATCH_FORWARD.observe(forward_s, method)
        metrics.BATCH_DECODE.observe(text_s, method)
        metrics.BATCH_DURATION.observe(forward_s + text_s, method)
        metrics.TOKENS.add(len(step.rows) // 4)

    def move(self, step: Step) -> None:
        for row, kv_len in step.prefilled:
            metrics.PREFILLED_TOKENS.add(kv_len)
            self.prefilling.discard(row)
            self.running.add(row)
        for row, _, _ in step.ended:
            self.prefilling.discard(row)
            self.running.discard(row)

    def failed(self) -> None:
        """The engine ended under its rows."""
        if self.prefilling or self.running:
            metrics.BATCH_COUNT.add(1, self.method)
            metrics.BATCH_FAILURE.add(1, self.method)
