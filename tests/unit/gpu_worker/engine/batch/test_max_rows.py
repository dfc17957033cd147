"""Rows behind the first `max_rows`: they stand by until one of those has ended."""

from gpu_worker.engine.batch.rows import Rows
from gpu_worker.protocol import Grant
from tests.support.engine.row_steps import BLOCK, EOS, collect, run_step, spans_of, start


def three_rows(end: int = 10, max_rows: int = 2) -> Rows:
    rows = Rows(BLOCK, [EOS])
    starts = [start(0, 2, end=3), start(1, 2), start(2, 5, end=end)]
    rows.apply(Grant(1000, 1000, starts, max_rows=max_rows))
    return rows


def numbers(rows: Rows) -> list[int]:
    return sorted(number for number, *_ in run_step(rows)[0])


def test_the_first_that_stands_by_takes_the_place_of_a_row_that_ends_in_the_next_step() -> None:
    rows = three_rows()
    assert [numbers(rows) for _ in range(4)] == [[0, 1], [0, 1], [0, 1], [1, 2]]


def test_a_row_whose_last_token_is_in_flight_has_left_its_place() -> None:
    rows = three_rows()
    for _ in range(2):
        run_step(rows)
    last = rows.launch()
    following = rows.launch()
    assert [number for number, *_ in spans_of(following)] == [1, 2]
    assert collect(rows, last).ended == [(0, "length", 3)]
    assert not collect(rows, following).ended


def test_a_row_that_is_stopped_leaves_its_place_and_one_that_stands_by_can_be_stopped() -> None:
    rows = three_rows()
    run_step(rows)
    rows.apply(Grant(1000, 1000, stops=[(2, "preempted")], max_rows=2))
    result = rows.take_result()
    assert (result.ended, result.released) == ([(2, "preempted", 0)], [(2, 0)])
    rows.apply(Grant(1000, 1000, [start(3, 5)], stops=[(1, "client")], max_rows=2))
    assert numbers(rows) == [0, 3]


def test_a_row_that_waits_for_blocks_keeps_its_place() -> None:
    rows = Rows(BLOCK, [EOS])
    rows.apply(Grant(1000, 1000, [start(0, BLOCK, num_blocks=1), start(1, 2)], max_rows=1))
    assert numbers(rows) == [0]
    assert numbers(rows) == []


def test_without_a_bound_all_rows_run() -> None:
    assert numbers(three_rows(max_rows=0)) == [0, 1, 2]
