"""The sampler: every parameter, mask and watermark against a float64 reference, rows against each other, and
tokens against their probabilities.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.request import BeamParams, SamplingParams
from gpu_worker.engine.batch.beams import Beam, BeamSearch, SearchStep, candidates_of, score_beams
from gpu_worker.engine.batch.step_result import Candidate, StepSamples
from gpu_worker.engine.sampling import sampler
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
from tests.support.engine.sampling_reference import fits, penalised, processed
from tests.support.parameters.slow_but import slow_but

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


def top_logprobs_of(sampled: StepSamples, row: int) -> Any:
    """Log-probabilities [vocabulary] of a row whose `top_n_tokens` is the whole vocabulary."""
    top, logprobs = sampled.top_logprobs[row], np.full(VOCABULARY, np.nan)
    logprobs[top.ids] = top.logprobs
    assert top.logprobs == sorted(top.logprobs, reverse=True)
    return logprobs


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty", "all"])
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
    monkeypatch.setattr(sampler, "draw", None)
    monkeypatch.setattr(sampler, "sampling_arguments", None)
    logits = logits_of(5, 2)
    assert sample(logits, [None, None]).ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "name", slow_but(["top_k", "typical_p", "all"], [name for name in CASES if "temperature" in CASES[name]])
)
def test_choices_follow_the_distribution(name: str) -> None:
    """One row for each of 2000 tokens, with two seeds and two choices; rare tokens are counted together."""
    num, logits = 2000, logits_of(2)
    requests = [
        request(SamplingParams(**CASES[name] | {"seed": row % 2, "choice": row // 2 % 2}), index=row // 4)
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


WORD = 2**32


def philox_4x32(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds of Philox-4x32, as in the paper (Salmon et al. 2011)."""
    first, second, third, fourth = counter
    for number in range(10):
        low_key = (key[0] + number * 0x9E3779B9) % WORD
        high_key = (key[1] + number * 0xBB67AE85) % WORD
        high, low = divmod(0xD2511F53 * first, WORD)
        other_high, other_low = divmod(0xCD9E8D57 * third, WORD)
        first, second, third, fourth = other_high ^ second ^ low_key, other_low, high ^ fourth ^ high_key, low
    return [first, second, third, fourth]


def test_noise_is_a_function_of_seed_choice_index_and_token() -> None:
    """Four words for each counter, for tokens 16 apart. The reference gives the known answers of
    Random123.
    """
    assert philox_4x32([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox_4x32([WORD - 1] * 4, [WORD - 1] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    own = [(2**64 - 3, 3, 70), (-(2**63), 0, 5)]
    rows = [request(SamplingParams(1.0, seed=seed, choice=choice), index=at) for seed, choice, at in own]
    found = sampler.noise_of([row for row in rows if row], 200, torch.device("cpu")).tolist()
    for numbers, (seed, choice, index) in zip(found, own, strict=True):
        for token in (0, 15, 16, 63, 64, 150, 199):
            words = philox_4x32(
                [token // 64 * 16 + token % 16, index, choice, 0], [seed % WORD, seed // WORD % WORD]
            )
            assert numbers[token] == np.float32(-math.log((words[token % 64 // 16] // 2 + 0.5) / 2**31))


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
    found = score_beams(logits, [None] * 3, [step], samples=True)
    return candidates_of([step], found)[7], logits.double().log_softmax(-1) + torch.tensor(TOTALS).double()[
        :, None
    ]


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
