"""Which prompts a step computes, and how much of each."""

from gpu_worker.engine.batch.prefill import PATIENCE
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.batch.step_result import PromptLogprobs
from gpu_worker.protocol import Grant
from tests.support.engine.row_steps import BLOCK, EOS, TEXT, rows_with, run_step, sampled_indices, start

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
    rows.apply(Grant(1000, 8, [start(3, 6)]))
    assert [[one[:3] for one in run_step(rows)[0]] for _ in range(3)] == [
        [(2, 8, 4), (3, 0, 4)],
        [(2, 12, 1), (3, 4, 2), (1, 0, 6)],
        [(2, 13, 1), (1, 6, 1), (3, 6, 1), (0, 0, 6)],
    ]


def test_a_prompt_that_others_pass_for_long_has_a_step_of_its_own_now_and_then() -> None:
    rows = rows_with(start(0, 20, class_index=2), prefill_tokens=8)
    computed = []
    for number in range(1, 3 * PATIENCE + 1):
        rows.apply(Grant(1000, 8, [start(number, 8, end=1)]))
        computed.append([one[:3] for one in run_step(rows)[0] if one[0] == 0])
    own = {place: slices for place, slices in enumerate(computed) if slices}
    assert own == {
        PATIENCE - 1: [(0, 0, 8)],
        2 * PATIENCE - 1: [(0, 8, 8)],
        3 * PATIENCE - 1: [(0, 16, 4)],
    }


def test_a_long_prompt_gets_more_than_what_others_leave_over() -> None:
    rows = rows_with(start(0, 400), prefill_tokens=64)
    for number in range(1, 4 * PATIENCE + 1):
        rows.apply(Grant(1000, 64, [start(number, 63, end=1)]))
        run_step(rows)
    assert rows.rows[0].kv_len >= 4 * 64


def test_long_prompts_that_have_waited_hold_up_an_urgent_one_for_a_step_at_most() -> None:
    waiting = [start(number, 200, class_index=2) for number in range(2 * PATIENCE)]
    rows = rows_with(*waiting, prefill_tokens=8)
    for _ in range(3 * PATIENCE):
        run_step(rows)
    for number in range(100, 100 + PATIENCE):
        rows.apply(Grant(1000, 8, [start(number, 8, end=1)]))
        steps = [run_step(rows)[0], run_step(rows)[0]]
        assert [one[:3] for step in steps for one in step if one[0] == number] == [(number, 0, 8)]


def test_of_prompts_that_wait_alike_each_has_its_turn() -> None:
    rows = rows_with(*[start(number, 1000, class_index=2) for number in range(5)], prefill_tokens=8)
    for number in range(100, 100 + 7 * PATIENCE):
        rows.apply(Grant(1000, 8, [start(number, 8, end=1)]))
        run_step(rows)
    assert min(rows.rows[number].kv_len for number in range(5)) >= 8


def test_fewer_tokens_of_prompts_go_beside_rows_that_decode() -> None:
    rows = Rows(BLOCK, [EOS])
    rows.apply(Grant(1000, 8, [start(0, 10), start(1, 2), start(2, 6)], mixed_prefill_tokens=3))
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
    assert counts == [8, 3, 3, 2, 2], "the steps that the last prompt takes are equal"
    rows.apply(Grant(1000, 8, [start(3, 5)]))
    assert run_step(rows)[0][-1] == (3, 0, 5, True), "a grant without the number has no such limit"
    rows.apply(Grant(1000, 8, [start(4, 1)]))
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
    rows.apply(Grant(1000, 1000, starts))
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
        rows.collect(
            slices,
            [TEXT] * num_samples,
            [-0.5] * num_samples,
            prompt_logprobs=[NO_LOGPROBS for one in slices if one.num_scored],
        )
        scored.append([(row, first) for row, first, *_ in rows.take_result().prompt_logprobs])
    assert shapes == [
        [(3, 0, 1, True, 0), (2, 0, 2, False, 2), (1, 0, 4, True, 0)],
        [(2, 2, 1, True, 0), (0, 0, 2, False, 2)],
        [(0, 2, 3, True, 2)],
        [],
    ]
    assert scored == [[(2, 1)], [(0, 1)], [(0, 3)], []]


def test_prompts_that_are_less_urgent_make_no_step_longer() -> None:
    rows = Rows(BLOCK, [EOS])
    rows.apply(Grant(1000, 100, [start(0, 1)], mixed_prefill_tokens=8, may_exceed=True))
    run_step(rows)
    rows.apply(Grant(1000, 100, [start(1, 60, class_index=1)], mixed_prefill_tokens=8, may_exceed=True))
    assert run_step(rows)[0][-1] == (1, 0, 8, False)
    rows.apply(Grant(1000, 100, [start(2, 40)], mixed_prefill_tokens=8, may_exceed=True))
    assert run_step(rows)[0][1:] == [(2, 0, 40, True), (1, 8, 52, True)], "those that are make it whole"


def test_rows_of_batches_wait_for_a_callers_prompt_for_one_step_and_go_on() -> None:
    bulk = [start(number, 3, class_index=2) for number in range(4)]
    rows = rows_with(*bulk, prefill_tokens=64)
    run_step(rows)
    rows.apply(Grant(1000, 64, [start(4, 20, class_index=0), start(5, 30, class_index=2)], may_exceed=True))
    steps = [[one[:3] for one in run_step(rows)[0]] for _ in range(2)]
    assert steps == [[(4, 0, 20)], [(4, 20, 1), (0, 3, 1), (1, 3, 1), (2, 3, 1), (3, 3, 1), (5, 0, 30)]]
