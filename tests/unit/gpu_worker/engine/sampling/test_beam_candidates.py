"""Continuations of beams: the best of all beams, and how a diversity rate ranks them."""

import pytest
import torch

from common.messages.request import BeamParams
from gpu_worker.engine.batch.beams import Beam, BeamSearch, Candidate, SearchStep, score_beams

VOCAB = 50
TOTALS = [-1.0, -1.5, -2.5]


def candidates(diversity: float) -> tuple[list[Candidate], torch.Tensor]:
    """The continuations of three beams, and the sums float64 [3, vocabulary] of all."""
    torch.manual_seed(0)
    logits = torch.randn(3, VOCAB) * 3
    search = BeamSearch(
        BeamParams(3, diversity=diversity), 9, {2: "eos_token"}, [Beam(total=total) for total in TOTALS]
    )
    step = SearchStep(7, search, 0, 3, search.num_candidates)
    found = score_beams(logits, [None] * 3, [step], samples=True).to_host().candidates()
    return found[7], logits.double().log_softmax(-1) + torch.tensor(TOTALS).double()[:, None]


@pytest.mark.parametrize("diversity", [0.0, 0.7, 3.0])
def test_the_best_are_found_by_their_sum_and_the_place_of_their_beam(diversity: float) -> None:
    """A rate above 0 favours continuations of the worse beams; their sums stay what they are."""
    found, totals = candidates(diversity)
    ranked = totals + diversity * torch.arange(3)[:, None]
    best = ranked.flatten().topk(6).indices.tolist()
    assert [(one.parent, one.token) for one in found] == [divmod(place, VOCAB) for place in best]
    for one in found:
        assert one.total == pytest.approx(float(totals[one.parent, one.token]), abs=1e-5)
        assert one.logprob == pytest.approx(one.total - TOTALS[one.parent], abs=1e-5)


def test_a_high_rate_leaves_the_worst_beam_alone() -> None:
    assert {one.parent for one in candidates(0.0)[0]} > {0}
    assert {one.parent for one in candidates(50.0)[0]} == {2}
