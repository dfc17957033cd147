"""The sampler alone: its distributions against a float64 reference, its choices against its distributions,
its rows against each other.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from common.messages.request import SamplingParams
from gpu_worker.engine.batch.grammar import GrammarMask
from gpu_worker.engine.batch.philox import BUFFERED, PhiloxStream, philox_uniforms
from gpu_worker.engine.batch.sampling_state import SampleRequest, SamplingState
from gpu_worker.engine.in_flight import StepSamples, unpack_samples
from gpu_worker.engine.sampling import cpu_sampler as native_choice
from gpu_worker.engine.sampling import sampler
from tests.support.engine.sampling_reference import log_softmax, processed
from tests.support.engine.start_rows import start_row

VOCABULARY = 60
PROMPT, GENERATED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [5, 8, 9, 7, 9]
ENDS = [2, 7]
BAD_WORDS = [[11], [9, 12], [7, 9, 13], [8, 9, 14], [6, 5, 3, 5, 8, 9, 7, 9, 15]]  # all but one come next
ALONE = {
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_k_of_all": {"temperature": 1.0, "top_k": 1000},
    "top_p": {"temperature": 1.0, "top_p": 0.83},
    "top_p_of_one": {"temperature": 1.0, "top_p": 0.0},
    "top_p_decay": {"temperature": 1.0, "top_p": 0.97, "top_p_decay": 0.8, "top_p_min": 0.3, "top_p_reset_ids": [9, 40]},
    "top_p_floor": {"temperature": 1.0, "top_p_decay": 0.5, "top_p_min": 0.4},
    "min_p": {"temperature": 1.3, "min_p": 0.07},
    "typical_p": {"temperature": 1.0, "typical_p": 0.61},
    "repetition": {"repetition_penalty": 1.7},
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": -1.1},
    "relative_frequency": {"relative_frequency_penalty": 1.9},
    "logit_bias": {"logit_bias": [(5, 4.0), (40, -100.0), (10**6, 50.0)]},
    "bad_words": {"bad_words": BAD_WORDS},
    "all": {
        "temperature": 0.8, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9,
        "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2, "relative_frequency_penalty": 0.5,
        "logit_bias": [(5, 1.5)], "bad_words": BAD_WORDS,
    },
}  # fmt: skip

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
PINNED = [0.8824668302545412, 0.3690383346754841, 0.5170696944527113]
askings = st.tuples(samplings, st.sampled_from([0, 3, VOCABULARY]), st.sampled_from([0, 20]))
"""Sampling, top_n_tokens, min_new_tokens."""


pytestmark = pytest.mark.usefixtures("way")


def request(
    sampling: SamplingParams | None,
    top_n_tokens: int = 0,
    min_new_tokens: int = 0,
    generated: Sequence[int] = GENERATED,
    index: int = -1,
    grammar: GrammarMask | None = None,
) -> SampleRequest | None:
    """Of a row that generated so much; `index` where another token than the next is meant."""
    start = start_row(
        0,
        [*PROMPT, *generated],
        100,
        len(generated),
        sampling=sampling,
        top_n_tokens=top_n_tokens,
        min_new_tokens=min_new_tokens,
    )
    state = SamplingState.of(start, ENDS, grammar)
    return state and SampleRequest(state, len(generated) if index < 0 else index)  # type: ignore[return-value]


def sample(logits: torch.Tensor, requests: Sequence[SampleRequest | None]) -> StepSamples:
    return unpack_samples(sampler.sample(logits, requests), requests)


def logits_of(seed: int, num: int = 1, ties: bool = False, size: int = VOCABULARY) -> torch.Tensor:
    """With `ties`, halves of whole numbers: many are equal."""
    values = np.random.default_rng(seed).normal(0, 3, (num, size))
    return torch.tensor(np.round(2 * values) / 2 if ties else values, dtype=torch.float32)


def distribution(sampled: StepSamples, row: int, size: int = VOCABULARY) -> Any:
    """Told by `top_n_tokens` of the whole vocabulary."""
    top, logprobs = sampled.top_logprobs[row], np.full(size, np.nan)
    logprobs[top.ids] = top.logprobs
    assert top.logprobs == sorted(top.logprobs, reverse=True)
    return logprobs


def check(
    sampled: StepSamples, row: int, logits: torch.Tensor, sampling: SamplingParams, barred: Sequence[int] = ()
) -> None:
    """The told distribution is the reference's, and the id comes from what is left."""
    expected = processed(
        logits.numpy(), replace(sampling, logit_bias=known(sampling)), PROMPT, GENERATED, barred
    )
    assert np.isfinite(expected[sampled.ids[row]])
    if sampling.temperature == 0:
        assert expected[sampled.ids[row]] == pytest.approx(expected.max(), abs=1e-5)
    told = log_softmax(logits.double().numpy()) if sampling.raw_logprobs else expected
    assert sampled.logprobs[row] == pytest.approx(told[sampled.ids[row]], abs=1e-4)
    if row in sampled.top_logprobs:
        top = sampled.top_logprobs[row]
        np.testing.assert_allclose(top.logprobs, np.sort(told)[::-1][: len(top.ids)], atol=1e-4)
        np.testing.assert_allclose(top.logprobs, told[top.ids], atol=1e-4)


def known(sampling: SamplingParams) -> list[tuple[int, float]]:
    return [(token, bias) for token, bias in sampling.logit_bias if token < VOCABULARY]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("name", ALONE)
def test_each_parameter(name: str, raw: bool, ties: bool) -> None:
    sampling = SamplingParams(**ALONE[name], raw_logprobs=raw)  # type: ignore[arg-type]
    logits = logits_of(1, 8, ties)
    sampled = sample(logits, [request(replace(sampling, seed=row), VOCABULARY) for row in range(8)])
    for row in range(8):
        check(sampled, row, logits[row], sampling)
        assert raw or not np.array_equal(
            distribution(sampled, row), log_softmax(logits[row].double().numpy())
        )


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.none() | askings, min_size=1, max_size=9), seed=st.integers(0, 99), ties=st.booleans()
)
def test_mixed_in_one_batch(
    rows: list[tuple[SamplingParams, int, int] | None], seed: int, ties: bool
) -> None:
    logits = logits_of(seed, len(rows), ties)
    sampled = sample(logits, [request(*asked) if asked else None for asked in rows])
    for row, asked in enumerate(rows):
        sampling, top_n_tokens, min_new_tokens = asked or (SamplingParams(), 0, 0)
        check(sampled, row, logits[row], sampling, ENDS if min_new_tokens else [])
        assert len(sampled.top_logprobs[row].ids if top_n_tokens else []) == top_n_tokens and (
            row in sampled.top_logprobs
        ) == bool(top_n_tokens)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(askings, min_size=2, max_size=9),
    seed=st.integers(0, 99),
    data=st.data(),
    size=st.sampled_from([VOCABULARY, 3000]),
)
def test_neighbours_change_nothing(
    rows: list[tuple[SamplingParams, int, int]], seed: int, data: st.DataObject, size: int
) -> None:
    """Bit for bit, also beside rows that are no numbers."""
    logits = logits_of(seed, len(rows), size=size)
    together = sample(logits, [request(*asked) for asked in rows])
    some = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, unique=True))
    broken = logits[some + some]
    broken[len(some) :] = math.nan
    again = sample(broken, [request(*rows[row]) for row in some + some])
    for place, row in enumerate(some):
        assert (again.ids[place], again.logprobs[place]) == (together.ids[row], together.logprobs[row])
        assert again.top_logprobs.get(place) == together.top_logprobs.get(row)


@pytest.mark.parametrize("name", [name for name in ALONE if "temperature" in ALONE[name]])  # type: ignore[operator]
def test_choices_follow_the_distribution(name: str) -> None:
    """One row for each of 2000 tokens, of two seeds and two choices; the rarest tokens are counted together."""
    num, logits = 2000, logits_of(2)
    requests = [
        request(SamplingParams(**ALONE[name], seed=row % 2, choice=row // 2 % 2), index=row // 4)  # type: ignore[arg-type]
        for row in range(num)
    ]
    sampled = sample(logits.expand(num, -1), requests)
    expected = num * np.exp(processed(logits[0].numpy(), SamplingParams(**ALONE[name]), PROMPT, GENERATED))  # type: ignore[arg-type]
    counts = np.bincount(sampled.ids, minlength=VOCABULARY)
    assert not counts[expected == 0].any()
    often = expected >= 5
    observed, awaited = (
        np.append(counts[often], counts[~often].sum()),
        np.append(expected[often], expected[~often].sum()),
    )
    filled = awaited > 0
    assert len(observed[filled]) == 1 or chisquare(observed[filled], awaited[filled]).pvalue > 1e-3


ALL_OF_THEM = [{}, {"top_k": 1}, {"top_p": 0.9999}, {"typical_p": 0.9999}]
"""Each keeps all tokens that are as likely as the likeliest, of 4,096 too."""


def drawn(logits: torch.Tensor, numbers: Sequence[float], asked: dict[str, Any]) -> list[int]:
    """What rows of the same logits take for these random numbers."""
    requests = [request(SamplingParams(temperature=1.0, **asked)) for _ in numbers]
    for number, one in zip(numbers, requests, strict=True):
        assert one
        one.state.random.begin, one.state.random.values = 0, [number] * BUFFERED
    return sample(logits.expand(len(numbers), -1), requests).ids


@pytest.mark.parametrize("asked", ALL_OF_THEM)
def test_what_weighs_nothing_is_never_drawn(asked: dict[str, Any]) -> None:
    """Four tokens share the numbers equally; a number at a border is the next one's."""
    logits = torch.tensor([-math.inf, 1.0, 1.0, -math.inf, 1.0, 1.0, -math.inf])
    assert drawn(logits, [0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 1 - 2**-53], asked) == [1, 1, 2, 4, 4, 5, 5]


@pytest.mark.parametrize("asked", ALL_OF_THEM)
def test_equal_tokens_share_the_numbers(asked: dict[str, Any]) -> None:
    assert drawn(torch.zeros(4096), [part / 32 for part in range(32)], asked) == list(range(0, 4096, 128))


def test_tokens_of_a_row_are_independent() -> None:
    """Pairs of one token and the next, of a seed and the next, of a choice and the next."""
    numbers = np.array([[philox_uniforms(seed, choice, 0, 4096) for choice in range(2)] for seed in range(2)])
    for one, other in (
        (numbers[..., :-1], numbers[..., 1:]),
        (numbers[0], numbers[1]),
        (numbers[:, 0], numbers[:, 1]),
    ):
        pairs = np.histogram2d(one.ravel(), other.ravel(), bins=8, range=[[0, 1], [0, 1]])[0]
        assert chisquare(pairs.ravel()).pvalue > 1e-3


def test_numbers_are_a_function_of_seed_choice_and_index() -> None:
    """Pinned: another library, machine or version must not change what a seed means."""
    assert philox_uniforms(7, 1, 0, 3).tolist() == PINNED
    assert philox_uniforms(7, 1, 64, 8).tolist() == philox_uniforms(7, 1, 0, 128)[64:72].tolist()
    for begin in (0, 1, BUFFERED - 1, BUFFERED, 1000):
        row = PhiloxStream(7, 1)
        assert [row.at(index) for index in range(begin, begin + 200)] == philox_uniforms(7, 1, 0, 1200)[
            begin : begin + 200
        ].tolist()
    assert PhiloxStream(2**64 - 1, 0).at(5) == PhiloxStream(-1, 0).at(5) != PhiloxStream(0, 0).at(5)


def test_ties() -> None:
    """Of equally likely tokens the lower ids are in a nucleus, all are in the top k, and the lowest is the
    likeliest.
    """
    logits = torch.zeros(1, 8)
    logits[0, 3] = -9.0
    cases = {
        "top_p": ({"top_p": 0.4}, [0, 1, 2]),
        "top_k": ({"top_k": 2}, [0, 1, 2, 4, 5, 6, 7]),
        "greedy": ({"temperature": 0.0}, [0]),
    }
    for asked, left in cases.values():
        requests = [
            request(SamplingParams(**{"temperature": 1.0, "seed": seed, **asked}))  # type: ignore[arg-type, dict-item]
            for seed in range(100)
        ]
        assert sorted(set(sample(logits.expand(100, -1), requests).ids)) == left
    top = sample(
        torch.tensor([[-1.0, -3.0, -4.0, -2.0, -3.0]]), [request(None, top_n_tokens=3)]
    ).top_logprobs[0]
    assert top.ids == [0, 3, 1]


def test_a_single_survivor_is_certain() -> None:
    """As in TGI: of the processed distribution it has the logarithm 0, of the model's own it has not."""
    for asked in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        for raw in (False, True):
            sampled = sample(
                logits_of(4),
                [request(SamplingParams(temperature=1.0, raw_logprobs=raw, **asked), top_n_tokens=2)],
            )
            assert (sampled.logprobs[0] == 0.0) == (not raw)
            assert math.isfinite(sampled.top_logprobs[0].logprobs[1]) == raw


class Fixed:
    """A guide that says the same of every token; it remembers what it heard, and whom it was asked after."""

    def __init__(self, allowed: Sequence[int] | None = None, biased: dict[int, float] | None = None) -> None:
        self.allowed, self.biased, self.heard = allowed, biased, list[int]()

    def accept(self, token: int) -> None:
        self.heard.append(token)

    def mask(self) -> Any:
        if self.allowed is None:
            return None
        bits = np.zeros(-(-VOCABULARY // 32) * 32, np.uint8)
        bits[list(self.allowed)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def bias(self) -> Any:
        return (
            None
            if self.biased is None
            else np.array([self.biased.get(token, 0) for token in range(VOCABULARY)], np.float32)
        )


def test_a_guide_has_its_say() -> None:
    """Beside rows without one; its mask and bias come after all else, as a bias and a ban of the row's own
    would.
    """
    logits = logits_of(6, 5)
    drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=1)
    asked = [drawn, drawn, drawn, None, drawn]  # one is greedy but for its guide
    grammars = [
        None,
        Fixed(allowed=[3, 31, 32, 59]),
        Fixed(biased={7: 5.0}),
        Fixed(allowed=[4]),
        Fixed([9, 10, 11], {10: 3.0}),
    ]
    sampled = sample(
        logits,
        [
            request(sampling, VOCABULARY, grammar=grammar)
            for sampling, grammar in zip(asked, grammars, strict=True)
        ],
    )
    for row, grammar in enumerate(grammars):
        given = logits[row].clone()
        if grammar and grammar.biased:
            given += torch.from_numpy(grammar.bias())
        barred = sorted(set(range(VOCABULARY)) - set(grammar.allowed)) if grammar and grammar.allowed else []
        check(sampled, row, given, asked[row] or SamplingParams(), barred)
        assert grammar is None or grammar.heard == GENERATED
    assert sampled.ids[3] == 4


def test_rows_that_ask_for_nothing_are_plainly_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling that changes nothing is no asking; a batch without asking is gone through as it is, and
    nothing is gathered of its rows.
    """
    nothing = [
        SamplingParams(),
        SamplingParams(seed=3, raw_logprobs=True, top_k=4, top_p=0.1, min_p=0.1, typical_p=0.1),
    ]
    assert [request(sampling) for sampling in nothing] == [None, None]
    assert request(None, min_new_tokens=3) is None  # has so many
    monkeypatch.setattr(sampler, "sample_into", None)
    monkeypatch.setattr(native_choice, "native_request", None)
    logits = logits_of(5, 2)
    assert sample(logits, [None, None]).ids == logits.argmax(-1).tolist()


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.lists(st.integers(0, 200), max_size=200),
    st.integers(0, 200),
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=5),
)
def test_a_manner_remembers_what_a_resumed_one_finds(
    prompt: list[int], tokens: list[int], base: int, words: list[list[int]]
) -> None:
    penalties = {"frequency_penalty": 0.5, "presence_penalty": 0.2, "relative_frequency_penalty": 0.7}
    decay = {
        "temperature": 1.0,
        "top_p": 0.9,
        "top_p_decay": 0.9,
        "top_p_min": 0.2,
        "top_p_reset_ids": [5],
    }
    sampling = SamplingParams(**penalties, **decay, bad_words=words)  # type: ignore[arg-type]
    start = start_row(0, [*prompt, *tokens[:base]], 999, len(tokens[:base]), sampling=sampling)
    whole = start_row(0, [*prompt, *tokens], 999, len(tokens), sampling=sampling)
    grown, resumed = SamplingState.of(start, []), SamplingState.of(whole, [])
    assert grown and resumed
    for token in tokens[base:]:
        grown.accept(token)
    assert (grown.tail, grown.banned_ids_at(5), grown.top_p) == (
        resumed.tail,
        resumed.banned_ids_at(5),
        resumed.top_p,
    )
    found = penalties_of(grown)
    assert found == penalties_of(resumed)
    for token, penalty in found.items():
        count, all_ids = tokens.count(token), [*prompt, *tokens]
        expected = 0.5 * count + 0.2 * (count > 0) + 0.7 * all_ids.count(token) / len(all_ids)
        assert penalty == pytest.approx(expected, rel=1e-5)


def penalties_of(state: SamplingState | None) -> dict[int, float]:
    assert state and state.token_counts
    return dict(zip(state.token_counts.ids.tolist(), state.penalty().tolist(), strict=True))
