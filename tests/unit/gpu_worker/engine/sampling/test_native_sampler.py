"""The native sampling kernels against torch: the same ids for the same rows."""

import ctypes
import math
from typing import Any

import numpy as np
import pytest
import torch

from common.messages.request import SamplingParams
from gpu_worker.engine.batch.sampling_state import SampleRequest, SamplingState
from gpu_worker.engine.cpu import native
from gpu_worker.engine.sampling import sampler
from gpu_worker.engine.sampling.sampler import SamplerOutput, sample_by_torch
from tests.support.engine.fixed_grammar import FixedGrammar
from tests.support.engine.row_steps import start_row
from tests.support.parameters.slow_but import slow_but

ENDS = [2, 9]
SIZES = (1, 15, 60, 3000, 49152)
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
    for row, request in enumerate(requests):
        num = request.state.top_n_tokens if request else 0
        assert found.top_ids[row, :num].tolist() == expected.top_ids[row, :num].tolist()
        torch.testing.assert_close(
            found.top_logprobs[row, :num], expected.top_logprobs[row, :num], rtol=1e-5, atol=2e-5
        )


@pytest.mark.parametrize("dtype", native.TYPE_CODES, ids=str)
@pytest.mark.parametrize("size", slow_but([60, 3000], SIZES))
def test_kernels_sample_the_same_ids_as_torch(size: int, dtype: torch.dtype, library: ctypes.CDLL) -> None:
    random = np.random.default_rng(size)
    for shape in SHAPES:
        num_rows = 4 if size > 10_000 else 20
        logits = logits_of(shape, random, num_rows, size, dtype)
        num_words = random.choice([1, size // 32 + 1, size // 32 + 3])
        requests = [random_request(random, size, num_words) for _ in range(num_rows)]
        compare(
            sampler.sample(logits, requests),
            sample_by_torch(logits, requests),
            requests,
        )
