"""What a proposal costs, by measured times."""

import pytest

from gpu_worker.engine.drafting.acceptance import PROPOSAL_COST, ProposalCosts, measure_steps


def test_a_step_is_measured_with_one_row_and_with_many() -> None:
    assert measure_steps(lambda rows: 4 + 0.5 * (rows - 1)) == (4, 0.5)
    assert measure_steps(lambda rows: 4 - 0.1 * (rows - 1)) == (4, 0), "noise"


def test_proposals_cost_more_the_more_rows_there_are() -> None:
    costs = ProposalCosts()
    assert costs.of_one == PROPOSAL_COST
    costs.set(10, 1, 2, 0.5)
    assert costs.of_one == pytest.approx((1 + 2) / 10)
    costs.num_rows = 11
    assert costs.of_one == pytest.approx((11 * 1 + 2 + 10 * 0.5) / 20)


def test_a_draft_for_few_rows_of_many_is_dear() -> None:
    costs = ProposalCosts(num_rows=8)
    costs.set(10, 0, 2, 0)
    assert costs.of_one == costs.of_drafted(8) == pytest.approx(0.2)
    assert costs.of_drafted(1) == pytest.approx(1.6)
