"""How many prompt tokens a step may have."""

import pytest

from common.messages.plan import Plan
from common.prefill_budget import MOST_PAUSES, TOKENS_PER_PAUSE, PrefillBudget, even_part


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
