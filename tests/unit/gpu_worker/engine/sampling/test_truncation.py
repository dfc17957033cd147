"""Truncation: equally likely tokens, and a single token that is left."""

import math

import pytest
import torch

from common.messages.request import SamplingParams
from tests.support.engine.sample_requests import (
    logits_of,
    request,
    sample,
)

pytestmark = pytest.mark.usefixtures("each_sampler")


def test_of_equally_likely_tokens_the_lower_ids_are_kept() -> None:
    """Top-p keeps the lower ids, top-k keeps all, and the lowest id is the likeliest."""
    logits = torch.zeros(1, 8)
    logits[0, 3] = -9.0
    cases = {
        "top_p": ({"top_p": 0.4}, [0, 1, 2]),
        "top_k": ({"top_k": 2}, [0, 1, 2, 4, 5, 6, 7]),
        "greedy": ({"temperature": 0.0}, [0]),
    }
    for params, kept in cases.values():
        requests = [
            request(SamplingParams(**{"temperature": 1.0, "seed": seed, **params}))  # type: ignore[arg-type, dict-item]
            for seed in range(100)
        ]
        assert sorted(set(sample(logits.expand(100, -1), requests).ids)) == kept
    top = sample(
        torch.tensor([[-1.0, -3.0, -4.0, -2.0, -3.0]]), [request(None, top_n_tokens=3)]
    ).top_logprobs[0]
    assert top.ids == [0, 3, 1]


def test_a_single_token_that_is_left_has_logprob_0() -> None:
    """As in TGI: in the processed distribution; not in the model's own, which `raw_logprobs` reports."""
    for params in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        for raw in (False, True):
            sampled = sample(
                logits_of(4),
                [request(SamplingParams(temperature=1.0, raw_logprobs=raw, **params), top_n_tokens=2)],
            )
            assert (sampled.logprobs[0] == 0.0) == (not raw)
            assert math.isfinite(sampled.top_logprobs[0].logprobs[1]) == raw
