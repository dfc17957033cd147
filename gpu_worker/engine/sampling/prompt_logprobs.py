"""Prompt log-probabilities: scores the tokens of prompts, chunk by chunk as prefill computes them."""

from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.engine.batch.inputs import offsets_of, to_device
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.sampling import native_sampler
from gpu_worker.engine.sampling.multinomial import SamplerOutput, raw_logprobs

MAX_LOGITS = 2**25
"""Most logits of prompts in one step: with their float32 copies a few hundred MB."""
MAX_CHUNK_LOGITS = 2**24
"""Logits that torch copies at a time, at most."""


def select_sample_logits(logits: torch.Tensor, slices: Sequence[RowSlice]) -> torch.Tensor:
    """logits float [num_logits, vocabulary] of a step → those to sample from, float [rows, vocabulary]."""
    if not any(row_slice.num_scored for row_slice in slices):
        return logits
    ends = np.cumsum([row_slice.num_logits for row_slice in slices])
    places = [
        np.arange(end - row_slice.num_samples, end) for end, row_slice in zip(ends, slices, strict=True)
    ]
    return logits.index_select(0, to_device(np.concatenate(places), logits.device))


def score_prompts(logits: torch.Tensor, slices: Sequence[RowSlice]) -> list[SamplerOutput]:
    """logits float [num_logits, vocabulary] of a step → for each slice that asks for prompt
    log-probabilities: ids int64 [tokens], logprobs float32 [tokens].
    """
    if not any(row_slice.num_scored for row_slice in slices):
        return []
    begins = offsets_of(row_slice.num_logits for row_slice in slices).tolist()
    return [
        score_prompt(logits[begin : begin + row_slice.num_scored], row_slice)
        for begin, row_slice in zip(begins, slices, strict=False)
        if row_slice.num_scored and row_slice.row.prompt_logprobs is not None
    ]


def score_prompt(logits: torch.Tensor, row_slice: RowSlice) -> SamplerOutput:
    """logits float [num_scored, vocabulary] of one slice → ids int64, logprobs float32 [num_scored]."""
    ids = row_slice.row.ids[row_slice.begin + 1 : row_slice.begin + 1 + row_slice.num_scored].astype(np.int64)
    return score_tokens(logits, to_device(ids, logits.device), row_slice.row.prompt_logprobs or 0)


@torch.inference_mode()
def score_tokens(logits: torch.Tensor, ids: torch.Tensor, num_tops: int) -> SamplerOutput:
    """logits float [tokens, vocabulary] in the places of ids int64 [tokens] → log-probabilities float32
    [tokens] of these ids, and of the `num_tops` likeliest tokens in place of each.
    """
    if library := native_sampler.kernels(logits):
        return native_sampler.score_natively(library, logits, ids, num_tops)
    size = max(1, MAX_CHUNK_LOGITS // logits.shape[1])
    chunks = [
        raw_logprobs(logits[first : first + size], ids[first : first + size], num_tops)
        for first in range(0, len(ids), size)
    ]
    return SamplerOutput(*map(torch.cat, zip(*chunks, strict=True)))
