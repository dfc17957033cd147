"""Steps of a row table without an engine: starts rows, collects the same token for all of them."""

from typing import Any

from common.messages.plan import NewRow
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.batch.step_result import StepSamples
from gpu_worker.protocol import StepResult
from tests.support.engine.start_rows import plan, start_row

BLOCK = 4
EOS = 2
TEXT = 7
"""Any id that ends no row."""


def start(
    row: int,
    num_ids: int,
    num_blocks: int = 100,
    base: int = 0,
    end: int = 10,
    **params: Any,
) -> NewRow:
    blocks = range(1 + 100 * row, 1 + 100 * row + num_blocks)
    return start_row(row, range(num_ids), end, base, blocks, **params)


def rows_with(*starts: NewRow, until: int = 1000, prefill_tokens: int = 1000) -> Rows:
    rows = Rows(BLOCK, [EOS])
    rows.apply(plan(until, prefill_tokens, list(starts)))
    return rows


def spans_of(slices: list[RowSlice]) -> list[tuple[int, int, int, bool]]:
    return [
        (row_slice.row.number, row_slice.begin, row_slice.count, row_slice.samples) for row_slice in slices
    ]


def collect(rows: Rows, slices: list[RowSlice], token: int = TEXT) -> StepResult:
    num_samples = sum(row_slice.samples for row_slice in slices)
    rows.collect(slices, StepSamples([token] * num_samples, [-0.5] * num_samples))
    return rows.take_result()


def run_step(rows: Rows, token: int = TEXT) -> tuple[list[tuple[int, int, int, bool]], StepResult]:
    slices = rows.launch()
    return spans_of(slices), collect(rows, slices, token)


def sampled_rows(result: StepResult) -> list[int]:
    """Rows that sampled."""
    return [row for row, *_ in result.sampled]


def sampled_indices(result: StepResult) -> list[int]:
    return [index for _, index, *_ in result.sampled]
