"""The row table alone: who takes part in a step, who waits, how rows end and when they are released."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.messages.packing import pack_floats
from common.messages.request import SamplingParams
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.batch.step_result import PromptLogprobs, StepResultBuilder, TopLogprobs
from gpu_worker.protocol import Grant, StartRow
from tests.support.engine.batch_player import packed
from tests.support.engine.start_rows import start_row

BLOCK = 4
EOS = 2
TEXT = 7  # any id that ends nothing
TOLD = PromptLogprobs(b"", b"", b"")


def start(
    row: int,
    num_ids: int,
    num_blocks: int = 100,
    base: int = 0,
    end: int = 10,
    **params: Any,
) -> StartRow:
    blocks = range(1 + 100 * row, 1 + 100 * row + num_blocks)
    return start_row(row, range(num_ids), end, base, blocks, **params)


def table(*starts: StartRow, until: int = 1000, prefill_tokens: int = 1000) -> Rows:
    rows = Rows(BLOCK, [EOS])
    rows.apply(Grant(until, prefill_tokens, list(starts)))
    return rows


def shape(slices: list[RowSlice]) -> list[tuple[int, int, int, bool]]:
    return [
        (row_slice.row.number, row_slice.begin, row_slice.count, row_slice.samples) for row_slice in slices
    ]


def read(rows: Rows, slices: list[RowSlice], token: int = TEXT) -> StepResultBuilder:
    num_samples = sum(row_slice.samples for row_slice in slices)
    rows.collect(slices, [token] * num_samples, [-0.5] * num_samples)
    return rows.take_result()


def step(rows: Rows, token: int = TEXT) -> tuple[list[tuple[int, int, int, bool]], StepResultBuilder]:
    slices = rows.launch()
    return shape(slices), read(rows, slices, token)


def numbers(outcome: StepResultBuilder) -> list[int]:
    """Rows that sampled."""
    return [row for row, *_ in outcome.samples]


def indices(outcome: StepResultBuilder) -> list[int]:
    return [index for _, index, *_ in outcome.samples]


def test_prefill_is_chunked_in_the_order_of_starts_beside_rows_that_decode() -> None:
    rows = table(start(0, 2), start(1, 10), start(2, 5), prefill_tokens=8)
    shapes = []
    for _ in range(4):
        slices, outcome = step(rows)
        shapes.append(slices)
    assert shapes == [
        [(0, 0, 2, True), (1, 0, 6, False)],
        [(0, 2, 1, True), (1, 6, 4, True), (2, 0, 4, False)],
        [(1, 10, 1, True), (0, 3, 1, True), (2, 4, 1, True)],
        [(1, 11, 1, True), (2, 5, 1, True), (0, 4, 1, True)],
    ]
    assert indices(outcome) == [2, 1, 3]


def test_prompts_that_are_told_of_take_few_tokens_of_a_step() -> None:
    """What comes after the last token of a prompt is sampled; what comes after all others is told of."""
    rows = Rows(BLOCK, [EOS], max_scored_tokens=3)
    rows.apply(
        Grant(
            1000,
            1000,
            [
                start(0, 5, prompt_logprobs=0),
                start(1, 4),
                start(2, 3, prompt_logprobs=1),
                start(3, 1, prompt_logprobs=0),
            ],
        )
    )
    shapes, told = [], []
    for _ in range(4):
        slices = rows.launch()
        shapes.append(
            [
                (
                    row_slice.row.number,
                    row_slice.begin,
                    row_slice.count,
                    row_slice.samples,
                    row_slice.num_scored,
                )
                for row_slice in slices
                if not row_slice.decodes
            ]
        )
        num_samples = sum(row_slice.samples for row_slice in slices)
        rows.collect(
            slices,
            [TEXT] * num_samples,
            [-0.5] * num_samples,
            prompt_logprobs=[TOLD for row_slice in slices if row_slice.num_scored],
        )
        told.append([(row, first) for row, first, *_ in rows.take_result().prompt_logprobs])
    assert shapes == [
        [(0, 0, 3, False, 3), (1, 0, 4, True, 0)],
        [(0, 3, 2, True, 1), (2, 0, 1, False, 1)],
        [(2, 1, 2, True, 1), (3, 0, 1, True, 0)],
        [],
    ]
    assert told == [[(0, 1)], [(0, 4), (2, 1)], [(2, 2)], []]


def test_a_row_that_has_ended_is_told_nothing_of_its_prompt() -> None:
    rows = table(start(0, 6, prompt_logprobs=0), prefill_tokens=4)
    slices = rows.launch()
    rows.apply(Grant(1000, 4, stops=[(0, "client")]))
    rows.collect(slices, [], [], prompt_logprobs=[TOLD])
    assert rows.take_result().prompt_logprobs == []


def test_a_row_in_flight_goes_on_from_what_is_not_read_yet() -> None:
    """Its input has a place among the samples of that step; once it is read, the host knows the token."""
    rows = table(start(0, 2), start(1, 10), start(2, 3), prefill_tokens=8)
    flights = [rows.launch()]
    for _ in range(4):
        flights.append(rows.launch())
        read(rows, flights[-2])
    assert [
        [(row_slice.row.number, row_slice.source_place) for row_slice in slices] for slices in flights
    ] == [
        [(0, None), (1, None)],
        [(0, 0), (1, None), (2, None)],
        [(1, 1), (0, 0), (2, 2)],
        [(1, 0), (0, 1), (2, 2)],
        [(1, 0), (0, 1), (2, 2)],
    ]
    read(rows, flights[-1])
    assert [row_slice.source_place for row_slice in rows.launch()] == [None] * 3


def test_prefilled_is_said_once() -> None:
    rows = table(start(0, 6), prefill_tokens=4)
    assert [step(rows)[1].prefilled for _ in range(4)] == [[], [(0, 6)], [], []]


def test_no_step_beyond_the_grant() -> None:
    rows = table(start(0, 3), until=2)
    assert [bool(step(rows)[0]) for _ in range(4)] == [True, True, False, False]
    rows.apply(Grant(3, 1000))
    assert [bool(step(rows)[0]) for _ in range(2)] == [True, False]
    assert rows.step == 3


def test_a_row_without_a_free_slot_waits_and_others_go_on() -> None:
    rows = table(start(0, 3, num_blocks=1), start(1, 1))
    assert step(rows)[0] == [(0, 0, 3, True), (1, 0, 1, True)]
    assert step(rows)[0] == [(0, 3, 1, True), (1, 1, 1, True)]
    assert step(rows)[0] == [(1, 2, 1, True)]
    rows.apply(Grant(1000, 1000, blocks=[(0, packed([9])), (77, packed([10]))]))
    assert step(rows)[0] == [(0, 4, 1, True), (1, 3, 1, True)]
    assert list(rows.rows[0].blocks) == [1, 9]


def test_a_prompt_goes_as_far_as_its_blocks() -> None:
    rows = table(start(0, 10, num_blocks=2), start(1, 3), prefill_tokens=12)
    assert step(rows)[0] == [(0, 0, 8, False), (1, 0, 3, True)]
    assert step(rows)[0] == [(1, 3, 1, True)]


def test_length_comes_before_eos() -> None:
    rows = table(start(0, 3, end=2), start(1, 3, end=1))
    assert step(rows, EOS)[1].ended == [(0, "eos_token", 1), (1, "length", 1)]
    assert rows.launch() == []


def test_eos_can_be_ignored() -> None:
    rows = table(start(0, 3, end=3, ignore_eos=True))
    assert [step(rows, EOS)[1].ended for _ in range(3)] == [[], [], [(0, "length", 3)]]


def test_stop_ids_end_a_row_after_length_and_eos() -> None:
    stops = {"stop_ids": [TEXT, EOS]}
    rows = table(start(0, 3, **stops), start(1, 3, end=1, **stops))  # type: ignore[arg-type]
    assert step(rows)[1].ended == [(0, "stop_sequence", 1), (1, "length", 1)]
    rows = table(start(0, 3, **stops), start(1, 3, ignore_eos=True, **stops))  # type: ignore[arg-type]
    assert step(rows, EOS)[1].ended == [(0, "eos_token", 1), (1, "stop_sequence", 1)]


def test_only_rows_that_ask_have_a_turn() -> None:
    """Row 1 asks until it has the tokens that it must have, whatever it started with; row 2 must have none
    but stop ids; row 3 samples.
    """
    sampling = SamplingParams(temperature=1.0)
    rows = table(
        start(0, 3),
        start(1, 9, base=4, min_new_tokens=6),
        start(2, 3, stop_ids=[1]),
        start(3, 3, sampling=sampling),
        prefill_tokens=15,
    )
    turns = []
    for _ in range(4):
        slices = rows.launch()
        turns.append(
            [
                (row_slice.row.number, row_slice.sample_request.index)
                for row_slice in slices
                if row_slice.samples and row_slice.sample_request
            ]
        )
        read(rows, slices)
    assert turns == [[(1, 4)], [(1, 5), (3, 0)], [(3, 1)], [(3, 2)]]


def test_likeliest_tokens_stand_beside_their_row() -> None:
    """The token of a row that was stopped meanwhile is dropped: those after it move up."""
    rows = table(start(0, 3), start(1, 3), start(2, 3))
    slices = rows.launch()
    rows.apply(Grant(1000, 1000, stops=[(1, "cancelled")]))
    rows.collect(
        slices,
        [TEXT] * 3,
        [-0.5] * 3,
        {1: TopLogprobs([8], [-1.0]), 2: TopLogprobs([7, 9], [-0.5, float("-inf")])},
    )
    outcome = rows.take_result()
    assert (numbers(outcome), outcome.top_logprobs) == (
        [0, 2],
        [(1, packed([7, 9]), pack_floats([-0.5, float("-inf")]))],
    )


def test_a_resumed_row_counts_from_its_base() -> None:
    rows = table(start(0, 6, base=4, end=6))
    slices, outcome = step(rows)
    assert slices == [(0, 0, 6, True)]
    assert (numbers(outcome), indices(outcome), outcome.ended) == ([0], [4], [])
    _, outcome = step(rows)
    assert (indices(outcome), outcome.ended, outcome.released) == ([5], [(0, "length", 6)], [(0, 7)])


def test_a_stopped_row_is_released_at_the_boundary() -> None:
    rows = table(start(0, 3), start(1, 3))
    step(rows)
    rows.apply(Grant(rows.step, 1000, stops=[(0, "stop_sequence"), (5, "cancelled")]))
    assert rows.launch() == []
    outcome = rows.take_result()
    assert (outcome.ended, outcome.released) == ([(0, "stop_sequence", 1)], [(0, 3)])
    assert [list(blocks) for blocks in outcome.freed] == [list(range(1, 101))]
    assert not rows.take_result()


def test_a_row_is_released_after_the_last_launched_step_that_held_it() -> None:
    """Two steps in flight: what the second brought for a row that ended in the first is dropped."""
    rows = table(start(0, 3), start(1, 3))
    first = rows.launch()
    second = rows.launch()
    assert shape(second) == [(0, 3, 1, True), (1, 3, 1, True)]
    rows.collect(first, [EOS, TEXT], [0.0, 0.0])
    outcome = rows.take_result()
    assert (numbers(outcome), outcome.ended, outcome.released) == ([0, 1], [(0, "eos_token", 1)], [])
    rows.apply(Grant(1000, 1000, stops=[(1, "cancelled")]))
    rows.collect(second, [TEXT, TEXT], [0.0, 0.0])
    outcome = rows.take_result()
    assert (numbers(outcome), outcome.ended, outcome.released) == (
        [],
        [(1, "cancelled", 1)],
        [(0, 4), (1, 4)],
    )


def test_no_step_is_launched_for_a_row_whose_last_token_is_in_flight() -> None:
    rows = table(start(0, 3, end=1))
    first = rows.launch()
    assert rows.launch() == []
    assert read(rows, first).released == [(0, 3)]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8),
    prefill_tokens=st.integers(1, 20),
    tokens=st.lists(st.sampled_from([TEXT, EOS]), min_size=400, max_size=400),
    ahead=st.booleans(),
)
def test_every_row_ends_once_and_within_its_blocks(
    lengths: list[tuple[int, int]], prefill_tokens: int, tokens: list[int], ahead: bool
) -> None:
    """Blocks are granted one at a time. With `ahead` each step is launched before the one before it is read."""
    rows = table(
        *[start(row, num_ids, 1, end=end) for row, (num_ids, end) in enumerate(lengths)],
        prefill_tokens=prefill_tokens,
    )
    taken: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
    ended: dict[int, tuple[str, int]] = {}
    released: list[int] = []
    flight: list[list[RowSlice]] = []
    while rows.rows:
        slices = rows.launch()
        assert sum(row_slice.count for row_slice in slices if not row_slice.decodes) <= prefill_tokens
        assert all(
            row_slice.kv_len <= len(row_slice.row.blocks) * BLOCK and not row_slice.row.ended
            for row_slice in slices
        )
        flight += [slices] if slices else []
        if not slices:
            rows.apply(
                Grant(1000, prefill_tokens, blocks=[(row, packed([500 + len(tokens)])) for row in rows.rows])
            )
        if flight and (not ahead or len(flight) > 1 or not slices):
            landed = flight.pop(0)
            num_samples = sum(row_slice.samples for row_slice in landed)
            rows.collect(landed, [tokens.pop() for _ in range(num_samples)], [0.0] * num_samples)
        outcome = rows.take_result()
        for row, index, token, _ in outcome.samples:
            assert index == len(taken[row]) and row not in ended
            taken[row].append(token)
        ended |= {row: (why, end) for row, why, end in outcome.ended}
        released += [row for row, _ in outcome.released]
    assert sorted(released) == sorted(ended) == sorted(taken)
    for row, (why, end) in ended.items():
        assert end == len(taken[row])
        assert why == ("length" if end == lengths[row][1] else "eos_token")
