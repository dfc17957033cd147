"""Requests of rows that sample, and a check of sampled tokens against the float64 reference."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.messages.request import SamplingParams
from gpu_worker.engine.batch.sampling_state import GrammarMask, SampleRequest, SamplingState
from gpu_worker.engine.batch.step_result import StepSamples
from gpu_worker.engine.engine import unpack_samples
from gpu_worker.engine.sampling import sampler
from tests.support.engine.row_steps import start_row
from tests.support.engine.sampling_reference import log_softmax, processed

VOCABULARY = 60
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
GENERATED = [5, 8, 9, 7, 9]
END_IDS = [2, 7]
BAD_WORDS = [[11], [9, 12], [7, 9, 13], [8, 9, 14], [6, 5, 3, 5, 8, 9, 7, 9, 15]]
"""All but the fourth would be completed by the next token."""

CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_k_of_all": {"temperature": 1.0, "top_k": 1000},
    "top_p": {"temperature": 1.0, "top_p": 0.83},
    "top_p_of_one": {"temperature": 1.0, "top_p": 0.0},
    "top_p_decay": {"temperature": 1.0, "top_p": 0.97, "top_p_decay": 0.8},
    "top_p_min": {"temperature": 1.0, "top_p_decay": 0.5, "top_p_min": 0.9},
    "top_p_reset_ids": {"temperature": 1.0, "top_p": 0.97, "top_p_decay": 0.8, "top_p_reset_ids": [9, 40]},
    "min_p": {"temperature": 1.3, "min_p": 0.07},
    "typical_p": {"temperature": 1.0, "typical_p": 0.61},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "presence_penalty": {"presence_penalty": -1.1},
    "relative_frequency_penalty": {"relative_frequency_penalty": 1.9},
    "logit_bias": {"logit_bias": [(5, 4.0), (40, -100.0), (10**6, 50.0)]},
    "bad_words": {"bad_words": BAD_WORDS},
    "grammar": {"temperature": 1.0, "grammar": "a"},
    "allowed_token_ids": {"temperature": 1.0, "top_p": 0.9, "allowed_token_ids": [5, 40, 41, 59, 10**6]},
    "watermark_delta": {"watermark_delta": 2.0, "watermark_gamma": 0.5},
    "watermark_gamma": {"temperature": 1.0, "watermark_delta": 4.0, "watermark_gamma": 0.25},
    "seed": {"temperature": 1.0, "seed": 7},
    "choice": {"temperature": 1.0, "choice": 1},
    "raw_logprobs": {"temperature": 0.5, "raw_logprobs": True},
    "all": {
        "temperature": 0.8, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9,
        "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2,
        "relative_frequency_penalty": 0.5, "logit_bias": [(5, 1.5)], "bad_words": BAD_WORDS,
        "watermark_delta": 1.0, "watermark_gamma": 0.5, "allowed_token_ids": [*range(40)],
    },
}  # fmt: skip
"""Sampling parameters of a row, by the field whose effect they show: each sampler is tried with each."""


def request(
    sampling: SamplingParams | None,
    top_n_tokens: int = 0,
    min_new_tokens: int = 0,
    generated: Sequence[int] = GENERATED,
    index: int = -1,
    grammar: GrammarMask | None = None,
) -> SampleRequest | None:
    """Makes the request of a row with these generated ids; `index` is its next token's by default."""
    start = start_row(
        0,
        [*PROMPT, *generated],
        100,
        len(generated),
        sampling=sampling,
        top_n_tokens=top_n_tokens,
        min_new_tokens=min_new_tokens,
    )
    state = SamplingState.of(start, END_IDS, grammar)
    return SampleRequest(state, len(generated) if index < 0 else index) if state else None


def sample(logits: torch.Tensor, requests: Sequence[SampleRequest | None]) -> StepSamples:
    return unpack_samples(sampler.sample(logits, requests), requests)


def logits_of(seed: int, num: int = 1, ties: bool = False, size: int = VOCABULARY) -> torch.Tensor:
    """Random logits float32 [num, size]; with `ties`, multiples of 0.5, many of them equal."""
    values = np.random.default_rng(seed).normal(0, 3, (num, size))
    return torch.tensor(np.round(2 * values) / 2 if ties else values, dtype=torch.float32)


def check_row(
    sampled: StepSamples, row: int, logits: torch.Tensor, sampling: SamplingParams, banned: Sequence[int] = ()
) -> None:
    """Checks that a row has the reference's log-probabilities, and an id that the reference does not exclude.

    `banned`: ids that may not come yet.
    """
    expected = processed(
        logits.numpy(), replace(sampling, logit_bias=known_biases(sampling)), PROMPT, GENERATED, banned
    )
    assert np.isfinite(expected[sampled.ids[row]])
    if sampling.temperature == 0:
        assert expected[sampled.ids[row]] == pytest.approx(expected.max(), abs=1e-5)
    reported = log_softmax(logits.double().numpy()) if sampling.raw_logprobs else expected
    assert sampled.logprobs[row] == pytest.approx(reported[sampled.ids[row]], abs=1e-4)
    if row in sampled.top_logprobs:
        top = sampled.top_logprobs[row]
        np.testing.assert_allclose(top.logprobs, np.sort(reported)[::-1][: len(top.ids)], atol=1e-4)
        np.testing.assert_allclose(top.logprobs, reported[top.ids], atol=1e-4)


def known_biases(sampling: SamplingParams) -> list[tuple[int, float]]:
    return [(token, bias) for token, bias in sampling.logit_bias if token < VOCABULARY]
