"""Rows: what ends them, which sample otherwise than greedily, and how their slices are arranged."""

from common.messages.request import SamplingParams
from gpu_worker.engine.batch.row import Row, RowSlice, arrange
from tests.support.engine.row_steps import (
    EOS,
    TEXT,
    collect,
    rows_with,
    run_step,
    sampled_indices,
    sampled_rows,
    start,
)


def test_length_comes_before_eos() -> None:
    rows = rows_with(start(0, 3, end=2), start(1, 3, end=1))
    assert run_step(rows, EOS)[1].ended == [(0, "eos_token", 1), (1, "length", 1)]
    assert rows.launch() == []


def test_eos_can_be_ignored() -> None:
    rows = rows_with(start(0, 3, end=3, ignore_eos=True))
    assert [run_step(rows, EOS)[1].ended for _ in range(3)] == [[], [], [(0, "length", 3)]]


def test_stop_ids_end_a_row_after_length_and_eos() -> None:
    stops = {"stop_ids": [TEXT, EOS]}
    rows = rows_with(start(0, 3, **stops), start(1, 3, end=1, **stops))  # type: ignore[arg-type]
    assert run_step(rows)[1].ended == [(0, "stop_sequence", 1), (1, "length", 1)]
    rows = rows_with(start(0, 3, **stops), start(1, 3, ignore_eos=True, **stops))  # type: ignore[arg-type]
    assert run_step(rows, EOS)[1].ended == [(0, "eos_token", 1), (1, "stop_sequence", 1)]


def test_only_rows_that_are_not_plainly_greedy_have_a_sample_request() -> None:
    """Row 0 is greedy; row 1 has one until `min_new_tokens`, those before its start included; row 2 has stop
    ids but no `min_new_tokens`; row 3 samples.
    """
    sampling = SamplingParams(temperature=1.0)
    rows = rows_with(
        start(0, 3),
        start(1, 9, base=4, min_new_tokens=6),
        start(2, 3, stop_ids=[1]),
        start(3, 3, sampling=sampling, class_index=1),
        prefill_tokens=15,
    )
    requests = []
    for _ in range(4):
        slices = rows.launch()
        requests.append(
            [
                (row_slice.row.number, row_slice.sample_request.index)
                for row_slice in slices
                if row_slice.samples and row_slice.sample_request
            ]
        )
        collect(rows, slices)
    assert requests == [[(1, 4)], [(1, 5), (3, 0)], [(3, 1)], [(3, 2)]]


def test_a_resumed_row_counts_from_its_base() -> None:
    rows = rows_with(start(0, 6, base=4, end=6))
    slices, result = run_step(rows)
    assert slices == [(0, 0, 6, True)]
    assert (sampled_rows(result), sampled_indices(result), result.ended) == ([0], [4], [])
    _, result = run_step(rows)
    assert (sampled_indices(result), result.ended, result.released) == ([5], [(0, "length", 6)], [(0, 7)])


def test_arrange_puts_decoding_rows_first_longest_first() -> None:
    """Chunks of prompts keep the order of starts."""
    rows = [Row.of(start(number, 4), [EOS]) for number in range(5)]
    begins = [2, 4, 0, 9, 6]
    arranged = arrange([RowSlice(row, begin, 1, True) for row, begin in zip(rows, begins, strict=True)])
    assert [(row_slice.row.number, row_slice.begin) for row_slice in arranged] == [
        (3, 9),
        (4, 6),
        (1, 4),
        (0, 2),
        (2, 0),
    ]


def test_first_length_of_a_resumed_row_is_its_prompt() -> None:
    """Its generated tokens are computed one by one, unless they are computed as the prompt is."""
    resumed = start(0, 6, base=4)
    assert Row.of(resumed, [EOS]).first_length == 2
    assert Row.of(resumed, [EOS], generated_as_prompt=True).first_length == 6
