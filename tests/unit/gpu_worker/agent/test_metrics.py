"""Batch metrics: a step that computes a prompt is a prefill, others are not, whoever stands by."""

from prometheus_client.parser import text_string_to_metric_families

from common.messages.request import StoppingParams
from common.metrics import catalogue
from common.metrics.catalogue import TOTAL
from common.metrics.exposition import own_values, render_fleet
from gpu_worker.agent.metrics import BatchMetrics
from gpu_worker.protocol import SAMPLE, Grant, StartRow, StepResult

NAME = catalogue.SKIPPED_TOKENS.name


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


def test_each_row_of_a_step_counts_what_speculation_gave_it() -> None:
    metrics, skipped = BatchMetrics(), catalogue.SKIPPED_TOKENS.series[()]
    before = dict(skipped)
    accepted, proposed = (
        metric.values["suffix",] for metric in (catalogue.ACCEPTED_TOKENS, catalogue.PROPOSED_TOKENS)
    )
    second = catalogue.ACCEPTED_AT.values["1",]
    plain = StepResult(1, samples=packed([(1, 1), (2, 1)]))
    guessed = packed([(1, 2), (1, 3), (1, 4), (2, 2)])
    metrics.on_steps(
        [plain, StepResult(2, samples=guessed, proposals=[("suffix", 3, 2), ("suffix", 1, 0)])], 0.0
    )
    metrics.count_steps()
    changed = {bound: number - before.get(bound, 0) for bound, number in skipped.items()}
    assert {bound: number for bound, number in changed.items() if number} == {0.0: 3, 2.0: 1, TOTAL: 2}
    assert catalogue.ACCEPTED_TOKENS.values["suffix",] == accepted + 2
    assert catalogue.PROPOSED_TOKENS.values["suffix",] == proposed + 4
    assert catalogue.ACCEPTED_AT.values["1",] == second + 1
    [shown] = [family for family in text_string_to_metric_families(exposed()) if family.name == NAME]
    values = {sample.labels.get("le", sample.name): sample.value for sample in shown.samples}
    assert values["2.0"] - values["1.0"] == changed[2.0] + before.get(2.0, 0)
    assert values["0.0"] == skipped[0.0]


def exposed() -> str:
    return render_fleet("p", own_values(), {}).decode()


def packed(places: list[tuple[int, int]]) -> bytes:
    """Samples of (row, index)."""
    return b"".join(SAMPLE.pack(row, index, 5, -0.5) for row, index in places)
