"""The sampling kernels against torch, choice by choice: the native ones, and Triton's in its interpreter.
What is launched; and each sampler honours each field.
"""

import ctypes
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from api.requests.fields import SamplingFields
from api.requests.validate import DRAW_ONLY
from common.messages.request import SamplingParams
from gpu_worker.engine.batch.sampling_state import SampleRequest, SamplingState
from gpu_worker.engine.cpu import native
from gpu_worker.engine.engine import unpack_samples
from gpu_worker.engine.sampling import sampler
from gpu_worker.engine.sampling.sampler import KeptArguments, SamplerOutput, sample_by_torch
from tests.support.engine import sample_requests
from tests.support.engine.fixed_grammar import FixedGrammar
from tests.support.engine.row_steps import start_row
from tests.support.engine.sample_requests import CASES, VOCABULARY, check_row, request
from tests.support.engine.triton_interpreter import KERNELS, forget_kernels, interpret_kernels, kernels
from tests.support.parameters.slow_but import slow_but

ENDS = [2, 9]
SIZES = (1, 15, 60, 1000, 3000, 49152)
SHAPES = ("spread", "peaked", "flat", "equal", "few")


def logits_of(
    shape: str, random: np.random.Generator, num_rows: int, size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of a larger matrix; in bfloat16 many are equal."""
    scale = {"spread": 3.0, "peaked": 3.0, "flat": 0.01, "equal": 0.0, "few": 3.0}[shape]
    values = random.normal(0, 1, (num_rows, size + 3)) * scale
    if shape == "peaked":
        values[:, random.integers(0, size, 5)] += 12
    if shape == "few":
        values[random.random(values.shape) < 0.9] = -math.inf
        values[:, size // 2] = 1.0
    return torch.tensor(values, dtype=torch.float32).to(dtype)[:, :size]


def random_request(random: np.random.Generator, size: int, num_words: int) -> SampleRequest | None:
    """Makes the request of a row with random parameters, or None. A grammar's mask has `num_words` words. The
    token in the middle is always allowed.
    """

    def choose(*values: Any) -> Any:
        return values[random.integers(len(values))]

    def ids(count: int) -> list[int]:
        return random.integers(0, size + 5, count).tolist()  # type: ignore[no-any-return]

    sampling = SamplingParams(
        temperature=choose(0.0, 0.3, 1.0, 1.0, 1.7),
        top_k=choose(0, 0, 0, 1, 5, 50, 2000, 10**6),
        top_p=choose(1.0, 1.0, 0.0, 0.5, 0.95, 0.9999),
        top_p_decay=choose(1.0, 1.0, 0.9),
        min_p=choose(0.0, 0.0, 0.0, 0.05, 1.0),
        typical_p=choose(1.0, 1.0, 1.0, 0.4, 0.95),
        repetition_penalty=choose(1.0, 1.3, 0.7),
        frequency_penalty=choose(0.0, 0.7),
        presence_penalty=choose(0.0, -0.3),
        relative_frequency_penalty=choose(0.0, 1.1),
        seed=int(random.integers(2**63)),
        logit_bias=[(token, float(random.normal(0, 4))) for token in set(ids(choose(0, 0, 3)))],
        bad_words=[[token] for token in ids(choose(0, 0, 2)) if token != size // 2],
        raw_logprobs=choose(False, False, True),
        allowed_token_ids=choose([], [], [*ids(size), size // 2]),
        watermark_delta=choose(0.0, 0.0, 2.0),
        watermark_gamma=choose(0.25, 0.5),
    )
    words = random.integers(-(2**31), 2**31, num_words).astype(np.int32)
    words[size // 64 :][:1] = -1
    grammar = choose(None, None, FixedGrammar(bits=words))
    generated = ids(choose(0, 9))
    start = start_row(
        0,
        ids(choose(5, 99)) + generated,
        999,
        len(generated),
        min_new_tokens=choose(0, 99),
        top_n_tokens=choose(0, 0, min(3, size), size),
        sampling=sampling,
    )
    state = SamplingState.of(start, ENDS, grammar)
    return state and SampleRequest(state, len(generated))  # type: ignore[return-value]


def compare(found: SamplerOutput, expected: SamplerOutput, requests: list[SampleRequest | None]) -> None:
    assert found.ids.tolist() == expected.ids.tolist()
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=2e-5)
    assert found.top_ids.shape == expected.top_ids.shape
    for row, own in enumerate(requests):
        num = own.state.top_n_tokens if own else 0
        assert found.top_ids[row, :num].tolist() == expected.top_ids[row, :num].tolist()
        torch.testing.assert_close(
            found.top_logprobs[row, :num], expected.top_logprobs[row, :num], rtol=1e-5, atol=2e-5
        )


def random_rows(
    random: np.random.Generator, shape: str, num_rows: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, list[SampleRequest | None]]:
    """Logits [rows, size], and rows with random parameters."""
    logits = logits_of(shape, random, num_rows, size, dtype)
    num_words = random.choice([1, size // 32 + 1, size // 32 + 3])
    return logits, [random_request(random, size, num_words) for _ in range(num_rows)]


@pytest.mark.parametrize("dtype", native.TYPE_CODES, ids=str)
@pytest.mark.parametrize("size", slow_but([60, 3000], SIZES))
def test_kernels_sample_the_same_ids_as_torch(size: int, dtype: torch.dtype, library: ctypes.CDLL) -> None:
    random = np.random.default_rng(size)
    for shape in SHAPES:
        logits, requests = random_rows(random, shape, 4 if size > 10_000 else 20, size, dtype)
        compare(sampler.sample(logits, requests), sample_by_torch(logits, requests), requests)


# --- the kernel of Triton -----------------------------------------------------------------------------------

UNIT = 2.0**40
DRAWN = SamplingParams(temperature=1.0, seed=1)


def sample_on_cuda(logits: torch.Tensor, requests: Sequence[SampleRequest | None]) -> SamplerOutput:
    """A step whose arguments nothing has kept."""
    return sampler.sample_on_cuda(logits, requests, KeptArguments())


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernel's module; rows and lists are looked at in many parts."""
    interpret_kernels(monkeypatch)
    module = kernels("sample")
    monkeypatch.setattr(module, "WIDTH", 64)
    monkeypatch.setattr(module, "PART", 32)
    yield module
    forget_kernels()


def exponential(x: torch.Tensor) -> torch.Tensor:
    """The kernel's, operation by operation, each rounded to float32."""
    shifted = x * 1.44269504088896341 + 12582912.0
    power = shifted - 12582912.0
    r = x - power * 0.693359375 + power * 2.12194440e-4
    y = r * 1.9875691500e-4 + 1.3981999507e-3
    for factor in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = y * r + factor
    y = y * r * r + r + 1.0
    return y * (power.int() + 127 << 23).view(torch.float32)


def weights_of(scores: torch.Tensor) -> torch.Tensor:
    return torch.where(scores > -28, exponential(scores.clamp(min=-28)) * UNIT, 0).long()


@pytest.fixture
def same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch computes the kernel's weights, to the last bit: so choices must be equal even where truncation
    cuts between two tokens.
    """
    monkeypatch.setattr(sampler, "to_weights", weights_of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES[:4])
def test_rows_with_any_parameters_are_sampled_as_by_torch(
    size: int, dtype: torch.dtype, kernel: ModuleType
) -> None:
    random = np.random.default_rng(size)
    for shape in SHAPES:
        logits, requests = random_rows(random, shape, 9, size, dtype)
        requests[-2:] = [request(replace(DRAWN, top_p=0.7)), None]
        compare(sample_on_cuda(logits, requests), sample_by_torch(logits, requests), requests)


def cases(seed: int) -> list[SampleRequest]:
    """One row for each way to truncate, and for their borders."""
    each: list[dict[str, Any]] = [
        {}, {"top_p": 0.0}, {"top_p": 1e-9}, {"top_p": 0.5}, {"top_p": 1 - 2**-53}, {"top_k": 1},
        {"top_k": 7}, {"top_k": 10**6}, {"top_k": 40, "top_p": 0.9}, {"min_p": 1.0}, {"min_p": 1e-4},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.2}, {"top_p": 0.9, "temperature": 1e-3},
        {"top_p": 0.9, "temperature": 100.0}, {"temperature": 0.0, "presence_penalty": 1.0},
    ]  # fmt: skip
    return [one for params in each if (one := request(replace(DRAWN, seed=seed, **params)))]


def hard_logits(size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(size)
    one = torch.full((size,), -math.inf)
    one[size // 2] = 3.0
    two = torch.full((size,), -40.0)
    two[[size // 3, size - 1]] = 5.0
    return {
        "equal": torch.full((size,), 7.0),
        "one finite": one,
        "two equal": two,
        "ties": torch.randn(size).bfloat16().float().round(),
        "close": torch.randn(size) * 1e-6,
        "doubling": -(2.0 ** torch.linspace(-149, 5, size)),
        "wide": torch.randn(size) * 1e30,
        "peaked": torch.randn(size) * 3 + torch.eye(1, size)[0] * 20,
    }


@pytest.mark.usefixtures("same_weights")
@pytest.mark.parametrize("name", hard_logits(200))
@pytest.mark.parametrize("seed", slow_but([3], range(3)))
def test_hard_logits_give_the_choices_of_torch(seed: int, name: str, kernel: ModuleType) -> None:
    requests = cases(seed)
    logits = hard_logits(200)[name].repeat(len(requests), 1)
    found, expected = sample_on_cuda(logits, requests), sample_by_torch(logits, requests)
    assert found.ids.tolist() == expected.ids.tolist()
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-6)


def test_a_row_is_its_own_beside_others_that_are_broken(kernel: ModuleType) -> None:
    """A row without a finite likeliest has no log-probability; what has a NaN for logit is never sampled."""
    torch.manual_seed(0)
    requests = cases(6)
    logits = torch.randn(len(requests), 100)
    alone = [sample_on_cuda(row[None], [own]) for row, own in zip(logits, requests, strict=True)]
    mixed = logits.repeat_interleave(2, 0)
    mixed[1::2] = torch.tensor([math.nan, math.inf, -math.inf]).repeat(len(requests))[: len(requests), None]
    found = sample_on_cuda(mixed, [own for own in requests for _ in range(2)])
    assert found.ids[::2].tolist() == [row.ids.item() for row in alone]
    assert torch.equal(found.logprobs[::2], torch.cat([row.logprobs for row in alone]))
    assert found.ids[1::2].tolist() == [0] * len(requests) and found.logprobs[1::2].isnan().all()
    logits[:, 7::2] = math.nan
    assert all(token < 7 or token % 2 == 0 for token in sample_on_cuda(logits, requests).ids.tolist())


ELSEWHERE = {"stop_token_ids", "ignore_eos", "cache_salt", "logprobs_mode", "report_logits"}
"""Fields that no sampler reads: they end rows, name blocks, or say what is reported of a choice."""
FIELDS = {*SamplingFields.model_fields, *(field.name for field in fields(SamplingParams))} - ELSEWHERE
ALLOWED = [5, 40, 41, 59]
MASK = np.packbits(np.isin(np.arange(64), ALLOWED), bitorder="little").view(np.int32)


def rows_of(params: SamplingParams) -> list[SampleRequest | None]:
    grammar = FixedGrammar(bits=MASK) if params.grammar else None
    return [request(params, VOCABULARY, index=index, grammar=grammar) for index in range(4)]


def launched(
    logits: torch.Tensor, rows: list[SampleRequest | None], patch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """What the Triton kernel is given: all that shows of it where Triton is not installed."""
    given: list[Any] = []

    def launch(*arguments: Any) -> tuple[torch.Tensor, ...]:
        given.extend(arguments)
        return logits, *torch.ones(2, len(rows), dtype=torch.int64)

    patch.setitem(sys.modules, f"{KERNELS}.sample", SimpleNamespace(sample_rows=launch))
    sample_on_cuda(logits, rows)
    return [*flattened(given)]


def flattened(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        yield from flattened(value) if isinstance(value, list) else (value,)


def is_honoured(name: str, sample: Callable[..., Any], is_whole: bool) -> bool:
    """Whether rows with this field differ from those without it, and, where the sampler is whole, are as the
    reference says.
    """
    if name not in CASES:
        return False
    params = SamplingParams(**CASES[name])
    rows, others = rows_of(params), rows_of(replace(params, **{name: getattr(SamplingParams(), name)}))
    logits = sample_requests.logits_of(1).expand(len(rows), -1)
    output, other = sample(logits, rows), sample(logits, others)
    if all(torch.equal(*pair) for pair in zip(output, other, strict=True)):
        return False
    banned = {*range(VOCABULARY)} - {*ALLOWED} if params.grammar else ()
    for row in range(len(rows)) if is_whole else ():
        check_row(unpack_samples(output, rows), row, logits[row], params, [*banned])
    return True


@pytest.mark.parametrize("by", ["torch", "kernels", "triton"])
def test_each_sampler_honours_each_field(
    by: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new field of the schema or message needs a case, and an effect in the reference and each sampler."""
    samples = {"torch": sample_by_torch, "kernels": sampler.sample, "triton": sample_on_cuda}
    sample: Callable[..., Any] = samples[by]
    is_whole = by != "triton" or find_spec("triton") is not None
    if not is_whole:
        sample = partial(launched, patch=monkeypatch)
    elif by != "torch":
        request.getfixturevalue({"kernels": "library", "triton": "kernel"}[by])
    assert {name for name in FIELDS if not is_honoured(name, sample, is_whole)} == set()


def test_greedy_rows_drop_the_fields_that_only_draw() -> None:
    """Alone, such a field turns sampling on; without sampling, it must not cost the fast path."""
    only_drawn = {
        name for name in FIELDS if request(SamplingParams(**CASES[name] | {"temperature": 0.0})) is None
    }
    assert only_drawn == {*DRAW_ONLY, "choice", "grammar", "raw_logprobs"}
