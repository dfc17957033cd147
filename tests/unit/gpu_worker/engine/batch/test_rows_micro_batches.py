"""Micro-batches: parts of a step that are in flight at the same time."""

from collections import deque

import pytest

from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.protocol import Grant, StartRow
from tests.support.engine.row_steps import BLOCK, EOS, TEXT, collect, spans_of, start


def rows_with(*starts: StartRow, num_micro_batches: int = 2, until: int = 1000, budget: int = 1000) -> Rows:
    rows = Rows(BLOCK, [EOS], num_micro_batches=num_micro_batches)
    rows.apply(Grant(until, budget, list(starts)))
    return rows


def numbers(slices: list[RowSlice]) -> list[int]:
    return sorted(row_slice.row.number for row_slice in slices)


def run(rows: Rows, launches: int) -> list[tuple[int, list[int]]]:
    """The step and the rows of each launch, with as many in flight as there may be."""
    launched, pending = list[tuple[int, list[int]]](), deque[list[RowSlice]]()
    while len(launched) < launches:
        while len(pending) < rows.num_micro_batches and (slices := rows.launch()):
            launched.append((rows.step, numbers(slices)))
            pending.append(slices)
        collect(rows, pending.popleft())
    return launched[:launches]


def test_rows_that_decode_are_divided() -> None:
    rows = rows_with(*(start(row, 1) for row in range(4)))
    assert run(rows, 5) == [(1, [0, 1, 2, 3]), (2, [0, 1]), (2, [2, 3]), (3, [0, 1]), (3, [2, 3])]


@pytest.mark.parametrize(("num_micro_batches", "num_rows"), [(2, 1), (2, 5), (3, 7), (4, 3)])
def test_each_row_is_in_each_step_once(num_micro_batches: int, num_rows: int) -> None:
    """So a row gets one token a step, whatever the size of the parts."""
    starts = [start(row, 1, end=6) for row in range(num_rows)]
    rows = rows_with(*starts, num_micro_batches=num_micro_batches)
    pending, launched, tokens = deque[list[RowSlice]](), list[tuple[int, int]](), 0
    while rows.rows:
        while len(pending) < num_micro_batches and (slices := rows.launch()):
            assert all(row_slice.source_place is None for row_slice in slices), "its last token is read"
            launched += [(rows.step, number) for number in numbers(slices)]
            pending.append(slices)
        tokens += len(collect(rows, pending.popleft()).samples)
    assert tokens == 6 * num_rows
    assert sorted(launched) == [(step, row) for step in range(1, 7) for row in range(num_rows)]


def test_a_row_that_starts_joins_the_step_that_runs() -> None:
    rows = rows_with(*(start(row, 1) for row in range(2)))
    collect(rows, rows.launch())
    assert numbers(rows.launch()) == [0]
    rows.apply(Grant(1000, 1000, [start(2, 3)]))
    assert (numbers(rows.launch()), rows.step) == ([1, 2], 2)


def test_chunks_of_one_prompt_follow_each_other_without_waiting() -> None:
    rows = rows_with(start(0, 10), budget=4)
    first, second = rows.launch(), rows.launch()
    assert spans_of(first) + spans_of(second) == [(0, 0, 4, False), (0, 4, 4, False)]
    third = rows.launch()
    assert spans_of(third) == [(0, 8, 2, True)]
    assert not rows.launch(), "its first token is not read"
    for slices in (first, second, third):
        collect(rows, slices, TEXT)
    assert numbers(rows.launch()) == [0]


def test_no_step_begins_beyond_the_grant() -> None:
    rows = rows_with(*(start(row, 1) for row in range(4)), until=2)
    collect(rows, rows.launch())
    first, second = rows.launch(), rows.launch()
    assert (rows.step, numbers(first), numbers(second)) == (2, [0, 1], [2, 3])
    collect(rows, first)
    assert not rows.launch()


def test_a_stopped_row_is_released_once_its_part_is_read() -> None:
    rows = rows_with(*(start(row, 1) for row in range(2)))
    collect(rows, rows.launch())
    first, second = rows.launch(), rows.launch()
    rows.apply(Grant(1000, 1000, stops=[(1, "cancelled")]))
    assert not rows.take_result().released
    assert not collect(rows, first).released
    assert collect(rows, second).released == [(1, 2)]
