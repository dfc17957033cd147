"""How many proposals are made, by how many were right."""

import pytest

from gpu_worker.engine.drafting.acceptance import (
    FIRST_LOSS,
    FIRST_PAUSE,
    LOSS_SHARE,
    TRIAL_PROPOSALS,
    Acceptance,
    TrialBudget,
)

MOST = 4
CHEAP = 0.15


def test_proposals_that_are_wrong_are_not_tried_for_a_while_and_then_again() -> None:
    acceptance, pauses = Acceptance(), []
    for _ in range(3):
        tried = 0
        while count := acceptance.num_worth(MOST, CHEAP):
            acceptance.learn(1, count, CHEAP)
            tried += count
        assert TRIAL_PROPOSALS <= tried < TRIAL_PROPOSALS + 8  # earlier ones count less
        acceptance.budget, paused = TrialBudget(), 0
        while not acceptance.num_worth(MOST, CHEAP):
            acceptance.learn(1, 0, CHEAP)
            paused += 1
        pauses.append(paused)
    assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]


@pytest.mark.parametrize("cost", [0.1, 0.4, 0.9])
@pytest.mark.parametrize("judged_together", [False, True])
def test_wrong_proposals_of_all_rows_lose_a_small_share(cost: float, judged_together: bool) -> None:
    """Whatever one costs, and if new rows come all the time; trials go on for ever."""
    num_rows, budget = 8, TrialBudget()
    gate = Acceptance(budget=budget) if judged_together else None
    num_tokens, lost, late = 0, 0.0, 0
    for step in range(4000):
        if step % 100 == 0:
            rows = [Acceptance(budget=budget, gate=gate) for _ in range(num_rows)]
        counts = [row.num_worth(MOST, cost) for row in rows]
        for row, count in zip(rows, counts, strict=True):
            row.learn(1, count, cost)
        num_tokens, lost = num_tokens + num_rows, lost + cost * sum(counts)
        late += sum(counts) * (step > 3000)
        assert lost < FIRST_LOSS + LOSS_SHARE * num_tokens + num_rows * MOST * cost
    assert late, "what was wrong once is tried again"


def test_proposals_that_cannot_pay_are_not_tried() -> None:
    assert Acceptance().num_worth(MOST, 1.0) == 0 and Acceptance().num_worth(MOST, 0.9) == MOST


def test_what_right_proposals_win_pays_for_trials_of_others() -> None:
    budget = TrialBudget(left=-1.0, is_open=False)
    good, other = Acceptance([9.0], [9.0], 12.0, budget=budget), Acceptance(budget=budget)
    assert good.num_worth(MOST) and not other.num_worth(MOST)
    for _ in range(2):
        good.learn(1 + MOST, MOST)
    assert other.num_worth(MOST)


def test_proposals_that_are_mostly_right_are_never_paused() -> None:
    acceptance = Acceptance()
    for step in range(200):
        count = acceptance.num_worth(MOST)
        assert count
        acceptance.learn(1 + count * (step % 10 < 6), count)


@pytest.mark.parametrize(("right", "expected"), [(0, 0), (1, 1), (2, 2), (8, 8)])
def test_as_many_are_proposed_as_are_right(right: int, expected: int) -> None:
    """After some steps, of which each confirms the first `right` proposals, at most."""
    acceptance = Acceptance()
    for _ in range(40):
        count = acceptance.num_worth(8)
        acceptance.learn(1 + min(right, count), count)
    assert acceptance.num_worth(8) in range(expected, min(8, 2 * expected) + 1)


def test_a_dearer_proposal_pays_less_often() -> None:
    acceptance = Acceptance()
    for step in range(20):
        acceptance.learn(2 if step % 2 else 1, 1)
    assert acceptance.best(1, 0.35) == 1 and acceptance.best(1, 0.9) == 0


def test_a_gate_judges_rows_that_have_not_proposed_much() -> None:
    """Where proposals of no row pay, none is made, until all rows together have come so far as a pause lasts;
    then a trial follows.
    """
    gate = Acceptance()
    while count := Acceptance(gate=gate).num_worth(MOST):
        Acceptance(gate=gate).learn(1, count)
    first, second = Acceptance(gate=gate), Acceptance(gate=gate)
    assert first.is_paused and gate.pause == FIRST_PAUSE
    for row in (first, second):
        row.learn(FIRST_PAUSE // 2, 0)
    assert not first.is_paused and first.is_on_trial and first.num_worth(MOST) == MOST


def test_a_row_that_has_proposed_much_judges_itself() -> None:
    gate = Acceptance()
    good, bad = Acceptance(gate=gate), Acceptance(gate=gate)
    for _ in range(9):
        good.learn(1 + MOST, MOST)
        if count := bad.num_worth(MOST):
            bad.learn(1, count)
    assert good.num_worth(MOST) == MOST and bad.num_worth(MOST) == 0
    assert not gate.pause and bad.pause
