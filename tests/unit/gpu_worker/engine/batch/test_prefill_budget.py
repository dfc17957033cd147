"""How many prompt tokens a step may have."""

from dataclasses import replace

import pytest

from common.messages.plan import Plan
from gpu_worker.engine.batch.prefill_budget import MOST_PAUSES, TOKENS_PER_PAUSE, PrefillBudget, even_part


@pytest.mark.parametrize(
    ("waiting", "most", "part"), [(128, 100, 64), (250, 246, 125), (90, 100, 90), (300, 100, 100), (0, 8, 0)]
)
def test_prompts_that_take_several_steps_take_equal_ones(waiting: int, most: int, part: int) -> None:
    assert even_part(waiting, most) == part


def grant(may_exceed: bool = True, mixed: int = 100) -> Plan:
    return Plan(1, 1, 1000, 1000, mixed_prefill_tokens=mixed, may_exceed=may_exceed)


def test_a_bound_that_a_user_set_is_never_exceeded() -> None:
    budget = PrefillBudget()
    assert [budget.tokens(grant(may_exceed=False), 4, waiting, waiting) for waiting in (150, 400, 9000)] == [
        75,
        100,
        100,
    ]
    assert budget.tokens(grant(may_exceed=False), 0, 9000, 9000) == 1000, "where no row waits"


def test_prompts_that_come_together_take_few_steps() -> None:
    budget = PrefillBudget(pauses=0.0)
    assert budget.tokens(grant(), 1, 1600, 1600) == 200, "an eighth of them"
    assert budget.tokens(grant(), 1, 9000, 9000) == 1000, "and no more than a whole step"


def test_prompts_have_a_whole_step_while_pauses_are_left() -> None:
    budget = PrefillBudget(pauses=1.0)
    assert budget.tokens(grant(), 8, 900, 900) == 1000
    assert budget.tokens(grant(), 8, 900, 900) == 113, "each of eight rows has paused"
    assert budget.pauses == pytest.approx(1 - 8 + 8 / TOKENS_PER_PAUSE)


def test_prompts_beside_which_rows_go_on_evenly_cost_no_pause() -> None:
    budget = PrefillBudget()
    assert budget.tokens(grant(), 8, 100, 100) == 100
    assert budget.tokens(grant(mixed=1000), 8, 9000, 9000) == 1000, "nor do whole steps in any case"
    assert budget.pauses == MOST_PAUSES


def test_fewer_than_one_gap_in_a_hundred_is_a_pause() -> None:
    """However many rows decode, and though prompts wait in every step."""
    for num_decoding in (1, 8, 256):
        budget = PrefillBudget(pauses=0.0)
        paused = [budget.tokens(grant(), num_decoding, 900, 900) == 1000 for _ in range(5000)]
        assert 0 < sum(paused) < len(paused) / 100


INTERACTIVE, BATCH = 0, 2


def callers_grant(bulk_tokens: int = 50) -> Plan:
    return replace(grant(), bulk_tokens=bulk_tokens)


def test_a_callers_prompt_has_a_step_without_bulk_prompts_and_bulk_rows_that_would_make_it_long() -> None:
    """Of two such steps in a row the second one has them."""
    budget, prompts = PrefillBudget(), [(INTERACTIVE, 128), (BATCH, 500)]
    steps = [budget.plan(callers_grant(), [BATCH] * 32, prompts) for _ in range(4)]
    assert [(step.left(INTERACTIVE), step.left(BATCH), step.decodes(BATCH)) for step in steps] == [
        (1000, 0, False),
        (1000, 50, True),
    ] * 2
    assert all(step.decodes(INTERACTIVE) for step in steps)


def test_a_few_bulk_rows_decode_beside_a_callers_prompt() -> None:
    assert PrefillBudget().plan(callers_grant(), [BATCH] * 16, [(INTERACTIVE, 128)]).decodes(BATCH)
    assert not PrefillBudget().plan(callers_grant(), [BATCH] * 17, [(INTERACTIVE, 128)]).decodes(BATCH)


def test_a_bulk_prompt_that_has_waited_long_enough_is_not_left_out() -> None:
    step = PrefillBudget().plan(callers_grant(), [BATCH] * 32, [(BATCH, 500), (INTERACTIVE, 128)])
    assert (step.left(BATCH), step.decodes(BATCH)) == (50, True)


def test_bulk_prompts_are_spread_while_callers_are_about_and_a_backlog_is_worked_off() -> None:
    budget, left, steps = PrefillBudget(), 4000, []
    while left:
        step = budget.plan(callers_grant(), [BATCH] * 8, [(BATCH, left)])
        steps.append(step.left(BATCH))
        left -= steps[-1]
    assert steps[0] == 50 and max(steps) <= 2 * 50 + 50
    assert len(steps) < 4000 / 50, "the more of them wait, the more a step has"


def test_bulk_prompts_have_whole_steps_while_nobody_calls() -> None:
    step = PrefillBudget(pauses=1.0).plan(grant(), [BATCH] * 8, [(BATCH, 900)])
    assert (step.left(BATCH), step.decodes(BATCH)) == (1000, True)


def test_prompts_of_callers_pay_for_pauses_of_callers_only() -> None:
    budget = PrefillBudget(pauses=0.0)
    assert budget.plan(callers_grant(), [BATCH] * 8, [(INTERACTIVE, 900)]).left(INTERACTIVE) == 1000
    budget = PrefillBudget(pauses=0.0)
    assert budget.plan(callers_grant(), [INTERACTIVE], [(INTERACTIVE, 900)]).left(INTERACTIVE) == 113


def test_a_step_with_bulk_rows_keeps_within_a_bound_that_a_user_set() -> None:
    step = PrefillBudget().plan(replace(callers_grant(), may_exceed=False), [BATCH] * 8, [(INTERACTIVE, 900)])
    assert step.left(INTERACTIVE) == 100
