"""Rows of a step, without an engine: which take part, in what parts, which wait or stand by, when they end
and are released; their inputs.

Which prompts a step computes, how much of each, and which units of pictures.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.plan import NewRow, Plan
from common.messages.request import LEAST_URGENT
from gpu_worker.engine.batch.prefill import PATIENCE, PrefillBudget
from gpu_worker.engine.batch.row import Adapter, Row, RowSlice, StepSlices
from gpu_worker.engine.batch.row_pictures import PictureShape, PictureState, PlacedPicture, RowPictures
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.batch.state_slots import Snapshots
from gpu_worker.engine.batch.step_result import PromptLogprobs, StepSamples
from tests.support.engine.batch_player import packed
from tests.support.engine.row_steps import (
    BLOCK,
    EOS,
    TEXT,
    collect,
    plan,
    rows_with,
    run_step,
    sampled_indices,
    sampled_rows,
    spans_of,
    start,
    start_row,
)


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
    in_flight: list[StepSlices] = []
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


def three_rows() -> Rows:
    rows = Rows(BLOCK, [EOS])
    starts = [start(0, 2, end=3), start(1, 2), start(2, 5)]
    rows.apply(plan(1000, 1000, starts, max_rows=2))
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


def rows_in_parts(*starts: NewRow, num_micro_batches: int = 2, budget: int = 1000) -> Rows:
    rows = Rows(BLOCK, [EOS], num_micro_batches=num_micro_batches)
    rows.apply(plan(1000, budget, list(starts)))
    return rows


def numbers(slices: Sequence[RowSlice]) -> list[int]:
    return sorted(row_slice.row.number for row_slice in slices)


@pytest.mark.parametrize(("num_micro_batches", "num_rows"), [(2, 1), (2, 5), (3, 7), (4, 3)])
def test_each_row_is_in_each_step_once(num_micro_batches: int, num_rows: int) -> None:
    """So a row gets one token a step, whatever the size of the parts."""
    starts = [start(row, 1, end=6) for row in range(num_rows)]
    rows = rows_in_parts(*starts, num_micro_batches=num_micro_batches)
    pending, launched, tokens = deque[StepSlices](), list[tuple[int, int]](), 0
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


@pytest.mark.parametrize(("most", "first"), [(1, [1, 3]), (2, [1, 2, 3]), (3, [1, 2, 3, 4])])
def test_rows_whose_adapter_finds_no_place_wait_for_more_urgent_and_older_rows(
    most: int, first: list[int]
) -> None:
    rows = Rows(BLOCK, [EOS], adapters={name: Adapter(name) for name in "abcd"}, max_adapters=most)
    starts = [start(0, 3, end=2, adapter="d", class_index=2)]
    starts += [start(row, 3, end=2, adapter=name) for row, name in enumerate("abac", 1)]
    rows.apply(plan(1000, 1000, starts))
    assert ran(rows) == first
    while rows.rows:
        assert ran(rows)


# --- prefill ------------------------------------------------------------------------------------------------

NO_LOGPROBS = PromptLogprobs(b"", b"", b"")


def test_prefill_is_chunked_the_shortest_first_beside_rows_that_decode() -> None:
    rows = rows_with(start(0, 2), start(1, 10), start(2, 5), prefill_tokens=8)
    shapes = []
    for _ in range(4):
        slices, result = run_step(rows)
        shapes.append(slices)
    assert shapes == [
        [(0, 0, 2, True), (2, 0, 5, True), (1, 0, 1, False)],
        [(2, 5, 1, True), (0, 2, 1, True), (1, 1, 8, False)],
        [(2, 6, 1, True), (0, 3, 1, True), (1, 9, 1, True)],
        [(1, 10, 1, True), (2, 7, 1, True), (0, 4, 1, True)],
    ]
    assert sampled_indices(result) == [1, 3, 3]


def test_prompts_of_the_urgent_are_computed_first() -> None:
    rows = rows_with(start(0, 6, class_index=2), start(1, 6, class_index=1), start(2, 12), prefill_tokens=8)
    run_step(rows)
    rows.apply(plan(1000, 8, [start(3, 6)]))
    assert [[one[:3] for one in run_step(rows)[0]] for _ in range(3)] == [
        [(2, 8, 4), (3, 0, 4)],
        [(2, 12, 1), (3, 4, 2), (1, 0, 6)],
        [(2, 13, 1), (1, 6, 1), (3, 6, 1), (0, 0, 6)],
    ]


@pytest.mark.parametrize("class_index", [0, LEAST_URGENT])
def test_the_prompt_under_which_a_worker_died_is_computed_first(class_index: int) -> None:
    suspect = replace(start(9, 20, class_index=class_index), is_suspect=True)
    rows = rows_with(*(start(number, 6) for number in range(5)), suspect, prefill_tokens=8)
    assert [run_step(rows)[0][0][:3] for _ in range(2)] == [(9, 0, 8), (9, 8, 8)]


def test_a_prompt_that_others_pass_for_long_has_a_step_of_its_own_now_and_then() -> None:
    rows = rows_with(start(0, 20, class_index=2), prefill_tokens=8)
    computed = []
    for number in range(1, 3 * PATIENCE + 1):
        rows.apply(plan(1000, 8, [start(number, 8, end=1)]))
        computed.append([one[:3] for one in run_step(rows)[0] if one[0] == 0])
    own = {place: slices for place, slices in enumerate(computed) if slices}
    assert own == {
        PATIENCE - 1: [(0, 0, 8)],
        2 * PATIENCE - 1: [(0, 8, 8)],
        3 * PATIENCE - 1: [(0, 16, 4)],
    }


def test_fewer_tokens_of_prompts_go_beside_rows_that_decode() -> None:
    rows = Rows(BLOCK, [EOS])
    rows.apply(plan(1000, 8, [start(0, 10), start(1, 2), start(2, 6)], mixed_prefill_tokens=3))
    shapes, counts = [], []
    for _ in range(5):
        slices, result = run_step(rows)
        shapes.append(slices)
        counts.append(result.prefill_tokens)
    assert shapes[:3] == [
        [(1, 0, 2, True), (2, 0, 6, True)],
        [(2, 6, 1, True), (1, 2, 1, True), (0, 0, 3, False)],
        [(2, 7, 1, True), (1, 3, 1, True), (0, 3, 3, False)],
    ]
    assert counts == [8, 3, 3, 3, 0]
    rows.apply(plan(1000, 8, [start(3, 5)]))
    assert run_step(rows)[0][-1] == (3, 0, 5, True), "a grant without the number has no such limit"
    rows.apply(plan(1000, 8, [start(4, 1)]))
    assert run_step(rows)[1].prefill_tokens == 0, "a single token is a step like that of a row that decodes"


def test_prompts_with_logprobs_take_few_tokens_of_a_step() -> None:
    """The token after the last of a prompt is sampled; those after the others are scored."""
    rows = Rows(BLOCK, [EOS], max_scored_tokens=3)
    starts = [
        start(0, 5, prompt_logprobs=0),
        start(1, 4),
        start(2, 3, prompt_logprobs=1),
        start(3, 1, prompt_logprobs=0),
    ]
    rows.apply(plan(1000, 1000, starts))
    shapes, scored = [], []
    for _ in range(4):
        slices = rows.launch()
        shapes.append(
            [
                (one.row.number, one.begin, one.count, one.samples, one.num_scored)
                for one in slices
                if not one.decodes
            ]
        )
        num_samples = sum(one.samples for one in slices)
        prompts = [NO_LOGPROBS for one in slices if one.num_scored]
        logprobs = [-0.5] * num_samples
        rows.collect(slices, StepSamples([TEXT] * num_samples, logprobs, prompt_logprobs=prompts))
        scored.append([(row, first) for row, first, *_ in rows.take_result().prompt_logprobs])
    assert shapes == [
        [(3, 0, 1, True, 0), (2, 0, 2, False, 2), (1, 0, 4, True, 0)],
        [(2, 2, 1, True, 0), (0, 0, 2, False, 2)],
        [(0, 2, 3, True, 2)],
        [],
    ]
    assert scored == [[(2, 1)], [(0, 1)], [(0, 3)], []]


def test_rows_of_batches_wait_for_a_callers_prompt_for_one_step_and_go_on() -> None:
    bulk = [start(number, 3, class_index=2) for number in range(4)]
    rows = rows_with(*bulk, prefill_tokens=64)
    run_step(rows)
    rows.apply(plan(1000, 64, [start(4, 20, class_index=0), start(5, 30, class_index=2)]))
    steps = [[one[:3] for one in run_step(rows)[0]] for _ in range(2)]
    assert steps == [[(4, 0, 20)], [(4, 20, 1), (0, 3, 1), (1, 3, 1), (2, 3, 1), (3, 3, 1), (5, 0, 30)]]


INTERACTIVE, BATCH = 0, 2


CALLERS_GRANT = Plan(1, 1, 1000, 1000, bulk_tokens=50)


def test_a_callers_prompt_has_a_step_without_bulk_prompts_and_bulk_rows_that_would_make_it_long() -> None:
    """Of two such steps in a row the second one has them."""
    budget, prompts = PrefillBudget(), [(INTERACTIVE, 128), (BATCH, 500)]
    steps = [budget.plan(CALLERS_GRANT, [BATCH] * 32, prompts) for _ in range(4)]
    assert [(step.left(INTERACTIVE), step.left(BATCH), step.bulk_decodes) for step in steps] == [
        (1000, 0, False),
        (1000, 50, True),
    ] * 2


def test_bulk_prompts_are_spread_while_callers_are_about_and_a_backlog_is_worked_off() -> None:
    budget, left, steps = PrefillBudget(), 4000, []
    while left:
        step = budget.plan(CALLERS_GRANT, [BATCH] * 8, [(BATCH, left)])
        steps.append(step.left(BATCH))
        left -= steps[-1]
    assert steps[0] == 50 and max(steps) <= 4 * 50
    assert len(steps) < 4000 / 50, "the more of them wait, the more a step has"


PICTURE_BLOCK = 16
TILE = 8
"""Placeholders of a tile, and what its encoding costs."""


def row_of(num_tiles: int, before: int = 4, cost: float = 1.0) -> Row:
    """A prompt of `before` tokens, a picture, and four tokens."""
    shape: Future[PictureShape] = Future()
    shape.set_result(PictureShape(num_tiles))
    picture = PictureState(num_tiles * TILE, shape, token_cost=cost)
    places = np.arange(before, before + num_tiles * TILE)
    ids = np.zeros(before + num_tiles * TILE + 4, np.int32)
    row = Row(0, ids, 9, np.arange(1, 101, dtype=np.int32))
    row.pictures = RowPictures([PlacedPicture(picture, places)])
    return row


def test_a_row_is_computed_up_to_the_first_placeholder_that_is_not_encoded() -> None:
    row = row_of(num_tiles=3)
    picture = row.pictures.placed[0].picture  # type: ignore[union-attr]

    def pictures_of(start: Any) -> RowPictures | None:
        return row.pictures

    rows = Rows(block_size=PICTURE_BLOCK, eos_ids=[], make_pictures=pictures_of)
    start = start_row(0, row.ids.tolist(), 9, blocks=list(range(1, 9)))
    rows.apply(plan(100, 14, [start]))
    chunks: list[tuple[int, int, list[int]]] = []
    while not chunks or chunks[-1][1] < len(row.ids):
        slices = rows.launch()
        units = [*range(picture.num_encoded, picture.num_scheduled)]
        picture.num_encoded = picture.num_scheduled
        chunks += [(one.begin, one.kv_len, units) for one in slices]
        rows.collect(slices, StepSamples([0] * sum(one.num_samples for one in slices), [0.0] * len(slices)))
    # 14 tokens a step: a tile costs 8 of them
    assert chunks == [(0, 6, [0]), (6, 12, [1]), (12, 18, [2]), (18, 32, [])]


def test_rows_of_batches_decode_while_a_callers_picture_takes_the_whole_step() -> None:
    """A step without any row would be taken for the end of all work."""
    picture = row_of(num_tiles=1, before=0, cost=5.0)

    def pictures_of(start: NewRow) -> RowPictures | None:
        return picture.pictures if start.request.class_name == "interactive" else None

    rows = Rows(block_size=PICTURE_BLOCK, eos_ids=[], make_pictures=pictures_of)
    bulk = [start_row(number, range(3), 9, blocks=[number + 1], class_index=2) for number in range(8)]
    rows.apply(plan(100, 24, bulk))
    run_step(rows)
    rows.apply(plan(100, 24, [start_row(8, picture.ids.tolist(), 9, blocks=[9, 10], class_index=0)]))
    assert [one[0] for one in run_step(rows)[0]] == [*range(9)]
    assert [one[0] for one in run_step(rows)[0]] == [8]
