"""Rows of a step, without an engine: which take part, in what parts, which wait or stand by, when they end
and are released; their inputs.
"""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.plan import NewRow
from common.messages.request import SamplingParams
from gpu_worker.engine.batch.adapters import TURN_STEPS, Adapter, AdapterTurns
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.batch.state_slots import Snapshots
from gpu_worker.engine.batch.step_result import StepSamples
from tests.support.engine.batch_player import packed
from tests.support.engine.row_steps import (
    BLOCK,
    EOS,
    TEXT,
    collect,
    rows_with,
    run_step,
    sampled_rows,
    spans_of,
    start,
)
from tests.support.engine.start_rows import plan, start_row


def test_a_row_that_has_its_last_token_ends_where_it_starts() -> None:
    """The broker may know the tokens that a client was shown, and not the end that followed."""
    rows = rows_with(
        start(0, 6, base=3, end=3),
        start_row(1, [5, TEXT, EOS], 10, base=1),
        start_row(2, [5, TEXT, 8], 10, base=2, stop_ids=[8]),
        start_row(3, [5, EOS], 10, base=0, blocks=[900]),
        start_row(4, [5, EOS], 10, base=1, blocks=[901], ignore_eos=True),
    )
    spans, result = run_step(rows)
    assert [row for row, *_ in spans] == [3, 4]
    assert result.ended == [(0, "length", 3), (1, "eos_token", 1), (2, "stop_sequence", 2)]
    assert [row for row, _ in result.released] == [0, 1, 2]


def test_a_row_is_released_after_the_last_launched_step_that_held_it() -> None:
    """Two steps in flight: the sample of the second for a row that ended in the first is dropped."""
    rows = rows_with(start(0, 3), start(1, 3))
    first = rows.launch()
    second = rows.launch()
    assert spans_of(second) == [(0, 3, 1, True), (1, 3, 1, True)]
    rows.collect(first, StepSamples([EOS, TEXT], [0.0, 0.0]))
    result = rows.take_result()
    assert (sampled_rows(result), result.ended, result.released) == ([0, 1], [(0, "eos_token", 1)], [])
    rows.apply(plan(1000, 1000, stops=[(1, "cancelled")]))
    rows.collect(second, StepSamples([TEXT, TEXT], [0.0, 0.0]))
    result = rows.take_result()
    assert (sampled_rows(result), result.ended, result.released) == (
        [],
        [(1, "cancelled", 1)],
        [(0, 4), (1, 4)],
    )


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8),
    prefill_tokens=st.integers(1, 20),
    tokens=st.lists(st.sampled_from([TEXT, EOS]), min_size=400, max_size=400),
    ahead=st.booleans(),
)
def test_every_row_ends_once_and_within_its_blocks(
    lengths: list[tuple[int, int]], prefill_tokens: int, tokens: list[int], ahead: bool
) -> None:
    """Blocks are granted one at a time. With `ahead` each step is launched before its predecessor is
    collected.
    """
    rows = rows_with(
        *[start(row, num_ids, 1, end=end) for row, (num_ids, end) in enumerate(lengths)],
        prefill_tokens=prefill_tokens,
    )
    sampled: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
    ended: dict[int, tuple[str, int]] = {}
    released: list[int] = []
    in_flight: list[list[RowSlice]] = []
    while rows.rows:
        slices = rows.launch()
        assert sum(row_slice.count for row_slice in slices if not row_slice.decodes) <= prefill_tokens
        assert all(
            row_slice.kv_len <= len(row_slice.row.blocks) * BLOCK and not row_slice.row.ended
            for row_slice in slices
        )
        in_flight += [slices] if slices else []
        if not slices:
            rows.apply(
                plan(1000, prefill_tokens, blocks=[(row, packed([500 + len(tokens)])) for row in rows.rows])
            )
        if in_flight and (not ahead or len(in_flight) > 1 or not slices):
            collected = in_flight.pop(0)
            num_samples = sum(row_slice.samples for row_slice in collected)
            rows.collect(
                collected, StepSamples([tokens.pop() for _ in range(num_samples)], [0.0] * num_samples)
            )
        result = rows.take_result()
        for row, index, token, _ in result.sampled:
            assert index == len(sampled[row]) and row not in ended
            sampled[row].append(token)
        ended |= {row: (reason, end) for row, reason, end in result.ended}
        released += [row for row, _ in result.released]
    assert sorted(released) == sorted(ended) == sorted(sampled)
    for row, (reason, end) in ended.items():
        assert end == len(sampled[row])
        assert reason == ("length" if end == lengths[row][1] else "eos_token")


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


def three_rows(end: int = 10, max_rows: int = 2) -> Rows:
    rows = Rows(BLOCK, [EOS])
    starts = [start(0, 2, end=3), start(1, 2), start(2, 5, end=end)]
    rows.apply(plan(1000, 1000, starts, max_rows=max_rows))
    return rows


def ran(rows: Rows) -> list[int]:
    return sorted(number for number, *_ in run_step(rows)[0])


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
    rows.apply(plan(1000, 1000, stops=[(2, "preempted")], max_rows=2))
    result = rows.take_result()
    assert (result.ended, result.released) == ([(2, "preempted", 0)], [(2, 0)])
    rows.apply(plan(1000, 1000, [start(3, 5)], stops=[(1, "client")], max_rows=2))
    assert ran(rows) == [0, 3]


def rows_in_parts(*starts: NewRow, num_micro_batches: int = 2, until: int = 1000, budget: int = 1000) -> Rows:
    rows = Rows(BLOCK, [EOS], num_micro_batches=num_micro_batches)
    rows.apply(plan(until, budget, list(starts)))
    return rows


def numbers(slices: list[RowSlice]) -> list[int]:
    return sorted(row_slice.row.number for row_slice in slices)


@pytest.mark.parametrize(("num_micro_batches", "num_rows"), [(2, 1), (2, 5), (3, 7), (4, 3)])
def test_each_row_is_in_each_step_once(num_micro_batches: int, num_rows: int) -> None:
    """So a row gets one token a step, whatever the size of the parts."""
    starts = [start(row, 1, end=6) for row in range(num_rows)]
    rows = rows_in_parts(*starts, num_micro_batches=num_micro_batches)
    pending, launched, tokens = deque[list[RowSlice]](), list[tuple[int, int]](), 0
    while rows.rows:
        while len(pending) < num_micro_batches and (slices := rows.launch()):
            assert all(row_slice.source_place is None for row_slice in slices), "its last token is read"
            launched += [(rows.step, number) for number in numbers(slices)]
            pending.append(slices)
        tokens += collect(rows, pending.popleft()).num_samples
    assert tokens == 6 * num_rows
    assert sorted(launched) == [(step, row) for step in range(1, 7) for row in range(num_rows)]


def test_chunks_of_one_prompt_follow_each_other_without_waiting() -> None:
    rows = rows_in_parts(start(0, 10), budget=4)
    first, second = rows.launch(), rows.launch()
    assert spans_of(first) + spans_of(second) == [(0, 0, 4, False), (0, 4, 4, False)]
    third = rows.launch()
    assert spans_of(third) == [(0, 8, 2, True)]
    assert not rows.launch(), "its first token is not read"
    for slices in (first, second, third):
        collect(rows, slices, TEXT)
    assert numbers(rows.launch()) == [0]


def test_the_least_recently_used_snapshot_makes_room() -> None:
    snapshots = Snapshots([12, 11])
    for block in (5, 6):
        snapshots.put(block, snapshots.take())
    assert snapshots.find(5) == 11 and snapshots.find(7) == 0
    snapshots.put(8, snapshots.take())
    assert (snapshots.find(5), snapshots.find(6), snapshots.find(8)) == (11, 0, 12)
    assert snapshots.take_changes() == [5, 6, -6, 8] and snapshots.take_changes() == []


FOUR = [Adapter(name) for name in "abcd"]


@given(st.integers(1, 3), st.integers(2, 4))
def test_each_adapter_comes_to_its_turn_and_keeps_it_for_a_while(most: int, wanted: int) -> None:
    turns = AdapterTurns(most)
    steps = [turns.choose(FOUR[:wanted]) for _ in range(8 * TURN_STEPS)]
    assert {len(step) for step in steps} == {min(most, wanted)}
    for adapter in FOUR[:wanted]:
        places = [place for place, step in enumerate(steps) if adapter in step]
        assert len(places) >= TURN_STEPS
        assert max(np.diff(places), default=1) <= wanted * TURN_STEPS + 1
