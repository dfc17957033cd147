"""Scores of the tokens of prompts, chunk by chunk as prefill computes them; and raw logits, copied to the
host for the rows that return them, as the model computed them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.engine.batch.inputs import offsets_of, to_device
from gpu_worker.engine.batch.row import RowSlice, are_next
from gpu_worker.engine.sampling import sampler
from gpu_worker.engine.sampling.sampler import SamplerOutput, raw_logprobs

MAX_LOGITS = 2**25
"""Most logits of prompts in one step: with their float32 copies a few hundred MB."""
MAX_CHUNK_LOGITS = 2**24
"""Logits that torch copies at a time, at most."""


def select_sample_logits(logits: torch.Tensor, slices: Sequence[RowSlice]) -> torch.Tensor:
    """logits float [num_logits, vocabulary] of a step → those to sample from, float [rows, vocabulary]."""
    if slices[-1].decodes or not any(row_slice.num_scored for row_slice in slices):
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
    if slices[-1].decodes or not any(row_slice.num_scored for row_slice in slices):
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
    if library := sampler.kernels(logits):
        return sampler.score_natively(library, logits, ids, num_tops)
    size = max(1, MAX_CHUNK_LOGITS // logits.shape[1])
    chunks = [
        raw_logprobs(logits[first : first + size], ids[first : first + size], num_tops)
        for first in range(0, len(ids), size)
    ]
    return SamplerOutput(*map(torch.cat, zip(*chunks, strict=True)))


MAX_PIECE_BYTES = 2**22
"""Bytes of one piece of a row's logits, at most, unless one position has more."""


@dataclass(frozen=True, slots=True)
class CopiedLogits:
    """Logits of one row on their way to the host: values float [positions, vocabulary] of the dtype that the
    row returns, from position `first` on.
    """

    row: int
    first: int
    values: torch.Tensor

    def pieces(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (row, first position, little-endian values), once the copy is done."""
        row_bytes = self.values.shape[1] * self.values.element_size()
        count = max(1, MAX_PIECE_BYTES // row_bytes)
        for begin in range(0, len(self.values), count):
            values = self.values[begin : begin + count].view(torch.uint8)
            yield self.row, self.first + begin, values.numpy().tobytes()


def copy_logits(logits: torch.Tensor, slices: Sequence[RowSlice]) -> list[CopiedLogits]:
    """logits float [num_logits, vocabulary] of a step → copies for the rows that return some. On CUDA they
    are only queued: before the next step, which may overwrite `logits`.
    """
    if are_next(slices) or not any(row_slice.row.logits for row_slice in slices):
        return []
    ends = offsets_of(row_slice.num_logits for row_slice in slices).tolist()[1:]
    return [
        copy_slice(logits[:end], row_slice)
        for end, row_slice in zip(ends, slices, strict=True)
        if row_slice.returned_logits
    ]


@torch.inference_mode()
def copy_slice(logits: torch.Tensor, row_slice: RowSlice) -> CopiedLogits:
    """logits float [positions, vocabulary], the last ones of the slice → a copy of those that it returns."""
    assert row_slice.row.logits is not None
    dtype, positions = getattr(torch, row_slice.row.logits[2]), row_slice.returned_logits
    place = len(logits) - row_slice.kv_len
    values = logits[place + positions.start : place + positions.stop].to(dtype)
    copied = values.to("cpu", non_blocking=True, copy=True)
    return CopiedLogits(row_slice.row.number, positions.start, copied)
