"""Batch metrics: a step that computes a prompt is a prefill, others are not, whoever stands by."""

from common.messages.request import StoppingParams
from common.metrics import catalogue
from gpu_worker.agent.metrics import BatchMetrics
from gpu_worker.protocol import Grant, StartRow, StepResult


def test_steps_beside_a_row_that_stands_by_are_those_that_they_are() -> None:
    counts = catalogue.BATCH_COUNT.values
    before = {method: counts[method,] for method in ("prefill", "decode")}
    metrics = BatchMetrics()
    starts = [StartRow(number, bytes(8), 0, bytes(4), StoppingParams(9)) for number in (1, 2)]
    metrics.on_grant(Grant(9, 8, starts, max_rows=1), 0.0)
    chunk = StepResult(1, prefill_tokens=7, duration_ms=2.0)
    last = StepResult(2, prefilled=[(1, 8)], duration_ms=2.0)
    metrics.on_steps([chunk, last, *(StepResult(step, duration_ms=2.0) for step in (3, 4, 5))], 0.005)
    assert counts["decode",] == before["decode"], "a step costs nothing by itself"
    metrics.count_steps()
    metrics.count_steps()
    assert {method: counts[method,] - before[method] for method in before} == {"prefill": 2, "decode": 3}
