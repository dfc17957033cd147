"""The sampler: every parameter against a float64 reference, and rows against each other."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.request import SamplingParams
from gpu_worker.engine.in_flight import StepSamples
from gpu_worker.engine.sampling import native_sampler, sampler
from tests.support.engine.sample_requests import (
    BAD_WORDS,
    CASES,
    END_IDS,
    GENERATED,
    PROMPT,
    VOCABULARY,
    check_row,
    known_biases,
    logits_of,
    request,
    sample,
)
from tests.support.engine.sampling_reference import log_softmax, penalised, processed

pytestmark = pytest.mark.usefixtures("each_sampler")

shares = st.sampled_from([0.13, 0.61, 0.9, 0.97, 1.0])
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5, 30, 100]),
    top_p=shares,
    top_p_decay=st.sampled_from([1.0, 1.0, 0.7]),
    top_p_min=st.sampled_from([1e-6, 0.5]),
    top_p_reset_ids=st.sampled_from([[], [8], [7, 3]]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.4]),
    typical_p=shares,
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.4]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.3]),
    relative_frequency_penalty=st.sampled_from([0.0, 1.1]),
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 3),
    logit_bias=st.lists(
        st.tuples(st.integers(0, VOCABULARY - 1), st.floats(-9, 9, width=16)),
        max_size=3,
        unique_by=lambda bias: bias[0],
    ),
    bad_words=st.lists(st.sampled_from(BAD_WORDS), max_size=3),
    raw_logprobs=st.booleans(),
)
row_params = st.tuples(samplings, st.sampled_from([0, 3, VOCABULARY]), st.sampled_from([0, 20]))
"""Sampling, top_n_tokens, min_new_tokens."""


def top_logprobs_of(sampled: StepSamples, row: int, size: int = VOCABULARY) -> Any:
    """Log-probabilities [size] of a row whose `top_n_tokens` is the whole vocabulary."""
    top, logprobs = sampled.top_logprobs[row], np.full(size, np.nan)
    logprobs[top.ids] = top.logprobs
    assert top.logprobs == sorted(top.logprobs, reverse=True)
    return logprobs


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_each_parameter_gives_the_distribution_of_the_reference(name: str, raw: bool, ties: bool) -> None:
    sampling = SamplingParams(**CASES[name], raw_logprobs=raw)
    logits = logits_of(1, 8, ties)
    sampled = sample(logits, [request(replace(sampling, seed=row), VOCABULARY) for row in range(8)])
    for row in range(8):
        check_row(sampled, row, logits[row], sampling)
        assert raw or not np.array_equal(
            top_logprobs_of(sampled, row), log_softmax(logits[row].double().numpy())
        )


@pytest.mark.parametrize("name", CASES)
def test_rows_may_report_logits_in_place_of_log_probabilities(name: str) -> None:
    """Raw ones as the model computed them; processed ones after penalties and temperature, and -inf for
    tokens that truncation excludes. Tokens are those of rows that report log-probabilities.
    """
    logits = logits_of(1, 4)
    samplings = [SamplingParams(**CASES[name], seed=3, raw_logprobs=raw) for raw in (True, False)]
    reporting = [replace(sampling, report_logits=True) for sampling in samplings]
    rows = [None, *(request(sampling, VOCABULARY) for sampling in reporting), request(samplings[0], 2)]
    found = sample(logits[[0, 1, 1, 1]], rows)
    plain = sample(logits[[0, 1, 1, 1]], [None, *(request(one, VOCABULARY) for one in samplings), rows[3]])
    assert found.ids == plain.ids and found.logprobs[::3] == plain.logprobs[::3]
    raw, values = logits[1].double().numpy(), logits[1].numpy()
    sampling = replace(samplings[1], logit_bias=known_biases(samplings[1]))
    scores = penalised(raw.copy(), sampling, [*PROMPT], [*GENERATED], []) / (sampling.temperature or 1.0)
    kept = np.isfinite(processed(values, sampling, PROMPT, GENERATED))
    for row, expected in ((1, raw), (2, np.where(kept, scores, -np.inf))):
        np.testing.assert_allclose(top_logprobs_of(found, row), expected, rtol=1e-5, atol=1e-5)
        assert found.logprobs[row] == pytest.approx(expected[found.ids[row]], rel=1e-5, abs=1e-5)


def test_a_greedy_row_may_report_logits() -> None:
    logits = logits_of(1, 2)
    [row] = [request(SamplingParams(report_logits=True, raw_logprobs=True))]
    found = sample(logits, [row, None])
    assert found.ids == logits.argmax(-1).tolist() and found.logprobs[0] == logits[0].max()
    assert found.logprobs[1] < 0


@settings(max_examples=50)
@given(
    rows=st.lists(st.none() | row_params, min_size=1, max_size=9), seed=st.integers(0, 99), ties=st.booleans()
)
def test_rows_with_different_parameters_share_a_batch(
    rows: list[tuple[SamplingParams, int, int] | None], seed: int, ties: bool
) -> None:
    logits = logits_of(seed, len(rows), ties)
    sampled = sample(logits, [request(*params) if params else None for params in rows])
    for row, params in enumerate(rows):
        sampling, top_n_tokens, min_new_tokens = params or (SamplingParams(), 0, 0)
        check_row(sampled, row, logits[row], sampling, END_IDS if min_new_tokens else [])
        assert len(sampled.top_logprobs[row].ids if top_n_tokens else []) == top_n_tokens and (
            row in sampled.top_logprobs
        ) == bool(top_n_tokens)


@settings(max_examples=30)
@given(
    rows=st.lists(row_params, min_size=2, max_size=9),
    seed=st.integers(0, 99),
    data=st.data(),
    size=st.sampled_from([VOCABULARY, 3000]),
)
def test_a_row_does_not_depend_on_its_neighbours(
    rows: list[tuple[SamplingParams, int, int]], seed: int, data: st.DataObject, size: int
) -> None:
    """Bit for bit, also beside rows whose logits are NaN."""
    logits = logits_of(seed, len(rows), size=size)
    together = sample(logits, [request(*params) for params in rows])
    chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, unique=True))
    broken = logits[chosen + chosen]
    broken[len(chosen) :] = math.nan
    again = sample(broken, [request(*rows[row]) for row in chosen + chosen])
    for place, row in enumerate(chosen):
        assert (again.ids[place], again.logprobs[place]) == (together.ids[row], together.logprobs[row])
        assert again.top_logprobs.get(place) == together.top_logprobs.get(row)


def test_rows_without_effective_parameters_are_plainly_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that change nothing make no request; a batch without requests is sampled as it is, without
    a copy of its rows.
    """
    without_effect = [
        SamplingParams(),
        SamplingParams(seed=3, raw_logprobs=True, top_k=4, top_p=0.1, min_p=0.1, typical_p=0.1),
    ]
    assert [request(sampling) for sampling in without_effect] == [None, None]
    assert request(None, min_new_tokens=3) is None  # the row has more
    monkeypatch.setattr(sampler, "sample_group", None)
    monkeypatch.setattr(native_sampler, "native_request", None)
    logits = logits_of(5, 2)
    assert sample(logits, [None, None]).ids == logits.argmax(-1).tolist()
