"""Multinomial sampling: tokens follow their probabilities, exactly at the borders."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from common.messages.request import SamplingParams
from gpu_worker.engine.batch.sampling_state import BUFFERED_NUMBERS
from tests.support.engine.sample_requests import (
    CASES,
    GENERATED,
    PROMPT,
    VOCABULARY,
    logits_of,
    request,
    sample,
)
from tests.support.engine.sampling_reference import fits, processed

pytestmark = pytest.mark.usefixtures("each_sampler")

KEEPS_ALL = [{}, {"top_k": 1}, {"top_p": 0.9999}, {"typical_p": 0.9999}]
"""Each keeps all tokens that are as likely as the likeliest, even 4,096."""


@pytest.mark.parametrize(
    "each_sampler", ["kernels", pytest.param("torch", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize("name", [name for name in CASES if "temperature" in CASES[name]])
def test_choices_follow_the_distribution(name: str) -> None:
    """One row for each of 2000 tokens, with two seeds and two choices; rare tokens are counted together.

    Torch samples the same ids as the kernels, which is tested apart (test_native_sampler.py).
    """
    num, logits = 2000, logits_of(2)
    requests = [
        request(SamplingParams(**CASES[name], seed=row % 2, choice=row // 2 % 2), index=row // 4)
        for row in range(num)
    ]
    sampled = sample(logits.expand(num, -1), requests)
    expected = num * np.exp(processed(logits[0].numpy(), SamplingParams(**CASES[name]), PROMPT, GENERATED))
    counts = np.bincount(sampled.ids, minlength=VOCABULARY)
    assert not counts[expected == 0].any()
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    filled = expected > 0
    assert len(observed[filled]) == 1 or fits(observed[filled], expected[filled])


def sample_with(logits: torch.Tensor, uniforms: Sequence[float], params: dict[str, Any]) -> list[int]:
    """Samples rows of the same logits by these random numbers."""
    requests = [request(SamplingParams(temperature=1.0, **params)) for _ in uniforms]
    for uniform, sample_request in zip(uniforms, requests, strict=True):
        assert sample_request
        sample_request.state.random.begin = 0
        sample_request.state.random.values = [uniform] * BUFFERED_NUMBERS
    return sample(logits.expand(len(uniforms), -1), requests).ids


@pytest.mark.parametrize("params", KEEPS_ALL)
def test_a_token_of_probability_0_is_never_sampled(params: dict[str, Any]) -> None:
    """Four tokens share the numbers equally; a number at a border belongs to the next one."""
    logits = torch.tensor([-math.inf, 1.0, 1.0, -math.inf, 1.0, 1.0, -math.inf])
    uniforms = [0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 1 - 2**-53]
    assert sample_with(logits, uniforms, params) == [1, 1, 2, 4, 4, 5, 5]


@pytest.mark.parametrize("params", KEEPS_ALL)
def test_equally_likely_tokens_share_the_numbers(params: dict[str, Any]) -> None:
    uniforms = [part / 32 for part in range(32)]
    assert sample_with(torch.zeros(4096), uniforms, params) == list(range(0, 4096, 128))
