"""Whether tokens are drawn, and what is left of the sampling parameters then."""

from typing import Any

import pytest

from api.inference.sampling import DRAW_ONLY, draws, sampling_params
from common.messages.request import SamplingParams
from tests.support.fleet.gateways import model_tokenizer
from tests.support.generation_params import generation_params

TOKENIZER = model_tokenizer()


def sampling(**fields: Any) -> SamplingParams | None:
    return sampling_params(generation_params(**fields), TOKENIZER)


@pytest.mark.parametrize(
    "fields",
    [
        {"do_sample": True},
        {"temperature": 0.9},
        {"top_k": 1},
        {"top_p": 0.0},
        {"min_p": 0.1},
        {"typical_p": 0.9},
        {"top_p_decay": 0.9},
    ],
)
def test_each_sampling_field_alone_turns_sampling_on(fields: dict[str, Any]) -> None:
    first, second = sampling(**fields), sampling(**fields)
    assert first is not None and second is not None
    assert first.temperature == fields.get("temperature", 1.0)
    assert 0 <= first.seed < 2**63 and first.seed != second.seed
    assert sampling(**fields | {"temperature": 0.0}) is None


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 0}, {"top_k": -1}, {"seed": 3}, {"top_p_min": 0.5}, {"top_p_reset_ids": [1]}]
)
def test_neutral_parameters_leave_decoding_greedy(fields: dict[str, Any]) -> None:
    assert not draws(generation_params(**fields))
    assert sampling(**fields, raw_logprobs=True) is None


def test_penalties_alone_leave_decoding_greedy() -> None:
    found = sampling(repetition_penalty=1.2, seed=5, temperature=1.0, raw_logprobs=True)
    assert found == SamplingParams(temperature=0.0, repetition_penalty=1.2, raw_logprobs=True)


def test_greedy_decoding_drops_sampling_parameters() -> None:
    found = sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1, seed=5, top_p_min=0.2, bad_words=["dog"])
    assert found is not None and found.bad_words
    assert all(getattr(found, name) == getattr(SamplingParams(), name) for name in DRAW_ONLY)


def test_top_k_is_at_most_the_vocabulary_and_biases_of_zero_are_dropped() -> None:
    found = sampling(top_k=10**9, logit_bias=[(5, 0.0), (6, -1.5)], seed=7)
    assert found == SamplingParams(temperature=1.0, top_k=TOKENIZER.size, logit_bias=[(6, -1.5)], seed=7)


def test_bad_words_are_spelled_within_a_text_and_after_a_space() -> None:
    found = sampling(bad_words=["dog"])
    assert found == SamplingParams(bad_words=[TOKENIZER.backend.encode(text).ids for text in ("dog", " dog")])
