"""The watermark's green lists, and its detector: the share of green tokens shows where a text comes from."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from common.messages.request import SamplingParams
from gpu_worker.engine.batch.sampling_state import SampleRequest, SamplingState
from gpu_worker.engine.sampling.penalties import green_ids
from gpu_worker.engine.sampling.sampler import sample
from tests.support.engine.sampling_reference import green
from tests.support.engine.start_rows import start_row

VOCABULARY = 1000
GAMMA = 0.25


def z_score(ids: Sequence[int], gamma: float, vocab_size: int) -> float:
    """The paper's detector: how far the number of green tokens is above chance, in standard deviations."""
    hits = sum(after in green(before, gamma, vocab_size) for before, after in pairwise(ids))
    count = len(ids) - 1
    return (hits - gamma * count) / math.sqrt(count * gamma * (1 - gamma))


def written(sampling: SamplingParams, num_tokens: int = 150, restart: int = 0) -> list[int]:
    """A prompt's token and those that are sampled behind it, from random logits; by another row from the
    token `restart` on.
    """
    ids, state = [3], None
    for i in range(num_tokens):
        if state is None or i == restart:
            state = SamplingState.of(start_row(0, ids, 999, len(ids) - 1, sampling=sampling), [])
        logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(i))
        token = int(sample(logits, [SampleRequest(state, i)] if state else [None]).ids[0])
        ids.append(token)
        if state:
            state.accept(token)
    return ids


def test_green_lists_are_those_of_text_generation_inference() -> None:
    for previous in (0, 1, 49151):
        found = green_ids(previous, GAMMA, VOCABULARY)
        assert found.tolist() == green(previous, GAMMA, VOCABULARY) and len(found) == 250
    assert set(green_ids(1, 0.5, VOCABULARY)) != set(green_ids(2, 0.5, VOCABULARY))


def test_the_detector_finds_a_watermarked_text_and_no_other() -> None:
    marked = SamplingParams(temperature=1.0, seed=5, watermark_delta=2.0, watermark_gamma=GAMMA)
    assert z_score(written(marked), GAMMA, VOCABULARY) > 5
    assert z_score(written(SamplingParams(watermark_delta=2.0, watermark_gamma=GAMMA)), GAMMA, VOCABULARY) > 5
    assert abs(z_score(written(SamplingParams(temperature=1.0, seed=5)), GAMMA, VOCABULARY)) < 4


def test_a_row_that_goes_on_elsewhere_keeps_its_watermark() -> None:
    marked = SamplingParams(temperature=1.0, seed=5, watermark_delta=2.0, watermark_gamma=GAMMA)
    assert written(marked, 40, restart=17) == written(marked, 40)
