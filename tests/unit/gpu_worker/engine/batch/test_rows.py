"""The row table alone: which rows take part in a step, which wait, and when rows are released."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from common.messages.records import pack_floats
from common.messages.request import SamplingParams
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.batch.step_result import PromptLogprobs, TopLogprobs
from gpu_worker.protocol import Grant
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
from tests.support.engine.start_rows import start_row

EMPTY_LOGPROBS = PromptLogprobs(b"", b"", b"")


def test_a_row_that_has_ended_reports_no_logprobs_of_its_prompt() -> None:
    rows = rows_with(start(0, 6, prompt_logprobs=0), prefill_tokens=4)
    slices = rows.launch()
    rows.apply(Grant(1000, 4, stops=[(0, "client")]))
    rows.collect(slices, [], [], prompt_logprobs=[EMPTY_LOGPROBS])
    assert rows.take_result().prompt_logprobs == []


def test_a_row_in_flight_continues_from_a_sample_that_is_not_collected_yet() -> None:
    """Its input has a place among the samples of that step; once it is collected, the host knows the id."""
    rows = rows_with(start(0, 2), start(1, 10), start(2, 3, class_index=1), prefill_tokens=8)
    steps = [rows.launch()]
    for _ in range(4):
        steps.append(rows.launch())
        collect(rows, steps[-2])
    assert [[(row_slice.row.number, row_slice.source_place) for row_slice in slices] for slices in steps] == [
        [(0, None), (1, None)],
        [(0, 0), (1, None), (2, None)],
        [(1, 1), (0, 0), (2, 2)],
        [(1, 0), (0, 1), (2, 2)],
        [(1, 0), (0, 1), (2, 2)],
    ]
    collect(rows, steps[-1])
    assert [row_slice.source_place for row_slice in rows.launch()] == [None] * 3


def test_the_end_of_prefill_is_reported_once() -> None:
    rows = rows_with(start(0, 6), prefill_tokens=4)
    assert [run_step(rows)[1].prefilled for _ in range(4)] == [[], [(0, 6)], [], []]


def test_no_step_runs_beyond_the_grant() -> None:
    rows = rows_with(start(0, 3), until=2)
    assert [bool(run_step(rows)[0]) for _ in range(4)] == [True, True, False, False]
    rows.apply(Grant(3, 1000))
    assert [bool(run_step(rows)[0]) for _ in range(2)] == [True, False]
    assert rows.step == 3


def test_a_row_without_a_free_slot_waits_and_the_others_continue() -> None:
    rows = rows_with(start(0, 3, num_blocks=1), start(1, 1, class_index=1))
    assert run_step(rows)[0] == [(0, 0, 3, True), (1, 0, 1, True)]
    assert run_step(rows)[0] == [(0, 3, 1, True), (1, 1, 1, True)]
    assert run_step(rows)[0] == [(1, 2, 1, True)]
    rows.apply(Grant(1000, 1000, blocks=[(0, packed([9])), (77, packed([10]))]))
    assert run_step(rows)[0] == [(0, 4, 1, True), (1, 3, 1, True)]
    assert list(rows.rows[0].blocks) == [1, 9]


def test_a_prompt_is_computed_as_far_as_its_blocks_reach() -> None:
    rows = rows_with(start(0, 10, num_blocks=2), start(1, 3, class_index=1), prefill_tokens=12)
    assert run_step(rows)[0] == [(0, 0, 8, False), (1, 0, 3, True)]
    assert run_step(rows)[0] == [(1, 3, 1, True)]


def test_top_logprobs_have_the_place_of_their_sample() -> None:
    """The token of a row that was stopped meanwhile is dropped: those after it move up."""
    rows = rows_with(start(0, 3), start(1, 3), start(2, 3))
    slices = rows.launch()
    rows.apply(Grant(1000, 1000, stops=[(1, "cancelled")]))
    rows.collect(
        slices,
        [TEXT] * 3,
        [-0.5] * 3,
        {1: TopLogprobs([8], [-1.0]), 2: TopLogprobs([7, 9], [-0.5, float("-inf")])},
    )
    result = rows.take_result()
    assert (sampled_rows(result), result.top_logprobs) == (
        [0, 2],
        [(1, packed([7, 9]), pack_floats([-0.5, float("-inf")]))],
    )


def test_a_stopped_row_is_released_at_the_boundary() -> None:
    rows = rows_with(start(0, 3), start(1, 3))
    run_step(rows)
    rows.apply(Grant(rows.step, 1000, stops=[(0, "stop_sequence"), (5, "cancelled")]))
    assert rows.launch() == []
    result = rows.take_result()
    assert (result.ended, result.released) == ([(0, "stop_sequence", 1)], [(0, 3)])
    assert [list(blocks) for blocks in result.freed] == [list(range(1, 101))]
    assert not rows.take_result()


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
    rows.collect(first, [EOS, TEXT], [0.0, 0.0])
    result = rows.take_result()
    assert (sampled_rows(result), result.ended, result.released) == ([0, 1], [(0, "eos_token", 1)], [])
    rows.apply(Grant(1000, 1000, stops=[(1, "cancelled")]))
    rows.collect(second, [TEXT, TEXT], [0.0, 0.0])
    result = rows.take_result()
    assert (sampled_rows(result), result.ended, result.released) == (
        [],
        [(1, "cancelled", 1)],
        [(0, 4), (1, 4)],
    )


def test_no_step_is_launched_for_a_row_whose_last_token_is_in_flight() -> None:
    rows = rows_with(start(0, 3, end=1))
    first = rows.launch()
    assert rows.launch() == []
    assert collect(rows, first).released == [(0, 3)]


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
                Grant(1000, prefill_tokens, blocks=[(row, packed([500 + len(tokens)])) for row in rows.rows])
            )
        if in_flight and (not ahead or len(in_flight) > 1 or not slices):
            collected = in_flight.pop(0)
            num_samples = sum(row_slice.samples for row_slice in collected)
            rows.collect(collected, [tokens.pop() for _ in range(num_samples)], [0.0] * num_samples)
        result = rows.take_result()
        for row, index, token, _ in result.samples:
            assert index == len(sampled[row]) and row not in ended
            sampled[row].append(token)
        ended |= {row: (reason, end) for row, reason, end in result.ended}
        released += [row for row, _ in result.released]
    assert sorted(released) == sorted(ended) == sorted(sampled)
    for row, (reason, end) in ended.items():
        assert end == len(sampled[row])
        assert reason == ("length" if end == lengths[row][1] else "eos_token")


class SlowGrammar:
    """A grammar that is compiled when the test says so, and allows one token."""

    ready = False

    def is_ready(self) -> bool:
        return self.ready

    def must_end(self) -> bool:
        return False

    def accept(self, token: int) -> str:
        return "" if token == TEXT else "grammar"

    def copy(self) -> "SlowGrammar":
        return self

    def after(self, token: int) -> "SlowGrammar":
        return self

    def forced(self, most: int) -> list[int]:
        return []

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def mask(self) -> None:
        return None


def test_a_row_waits_for_its_grammar_and_fails_at_a_token_that_it_forbids() -> None:
    grammar = SlowGrammar()
    rows = Rows(BLOCK, [EOS], lambda source, tokens: grammar)
    guided = start(0, 2, sampling=SamplingParams(grammar="g"))
    rows.apply(Grant(1000, 1000, [guided, start(1, 2)]))
    assert run_step(rows)[0] == [(1, 0, 2, True)]
    grammar.ready = True
    assert run_step(rows)[0] == [(1, 2, 1, True), (0, 0, 2, True)]
    _, result = run_step(rows, token=TEXT + 1)
    assert sampled_rows(result) == [1] and result.ended == [(0, "grammar", 1)]
