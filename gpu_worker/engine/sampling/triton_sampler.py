"""Sampling on CUDA by one Triton kernel: all rows of a step in one launch, whatever their parameters. It
samples the same tokens as torch does in sampler.py. Rows that are greedy without penalties have a kernel of
their own.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.batch.sampling_state import Bits, Float32, Int64, SampleRequest
from gpu_worker.engine.sampling.grammar import WORD_BITS, mask_of, num_words
from gpu_worker.engine.sampling.multinomial import (
    EXCLUDED,
    SamplerOutput,
    empty_output,
    log_of_weights,
    top_k,
    write_raw_logprobs,
)
from gpu_worker.engine.sampling.penalties import NO_IDS, NO_VALUES, watermark

MAX_INT32 = 2**31 - 1
ALIGNMENT = 16
NO_MASK = np.zeros(0, np.int32)


def greedy_output(logits: torch.Tensor) -> SamplerOutput:
    """logits float [rows, vocabulary] → the likeliest tokens without a copy of the logits: ids int64 [rows],
    logprobs float32 [rows]
    """
    ids, logprobs = greedy(logits)
    return SamplerOutput(ids, logprobs, ids[:, None][:, :0], logprobs[:, None][:, :0])


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float [rows, vocabulary] → ids int64 [rows] of the likeliest tokens, natural logarithms of their
    probabilities float32 [rows].
    """
    if logits.is_cuda:
        from gpu_worker.engine.cuda.kernels.greedy import greedy_rows  # Triton: in CUDA builds only

        return greedy_rows(logits)
    best, ids = logits.max(-1)
    # in place: a second buffer of this size would cost page faults
    below = logits.to(torch.float32, copy=True).sub_(best.float()[:, None])
    return ids, below.exp_().sum(-1).log_().neg_()


class RowParameters(NamedTuple):
    """What the kernel reads of a row, each a float64; the kernel knows their order.

    Attributes:
        place: the row of the logits.
        temperature: 0 for the likeliest token.
        top_k: 0 for all tokens.
        lowest: the logarithm of min_p, rounded to float32.
        raw_logprobs: whether the log-probability is the model's own.
        biased, green, banned, history: where the row's parts of `ids` and `values` begin: logit bias,
            watermark, bans, and what penalties subtract. Each part ends where the next begins.
        history_end: where the last part ends.
        mask, num_masked: where the row's mask begins in `masks`, and how many tokens it covers.
    """

    place: float
    temperature: float
    repetition_penalty: float
    top_k: float
    top_p: float
    lowest: float
    typical_p: float
    uniform: float
    raw_logprobs: float
    biased: float
    green: float
    banned: float
    history: float
    history_end: float
    mask: float
    num_masked: float


class SamplingArguments(NamedTuple):
    """parameters float64 [rows, 16] as `RowParameters`; ids int32 and values float32 [n], masks int32 [m]."""

    parameters: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor
    masks: torch.Tensor


def sample_on_cuda(logits: torch.Tensor, requests: Sequence[SampleRequest | None]) -> SamplerOutput:
    """logits float [rows, vocabulary] → ids int64 [rows], log-probabilities float32 [rows]. A request of None
    is greedy without penalties; one request at least is not.
    """
    from gpu_worker.engine.cuda.kernels.sample import sample_rows  # Triton: in CUDA builds only

    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_tops = max(request.state.top_n_tokens for request in requests if request)
    output = empty_output(len(requests), num_tops, logits.device)
    if not all(requests):
        for column, values in zip(output, greedy(logits), strict=False):
            column.copy_(values)
    arguments = sampling_arguments(requests, logits.shape[1], logits.device)
    scores, totals, kept = sample_rows(logits, *arguments, output.ids, output.logprobs)
    if num_tops:
        write_tops(output, logits, requests, scores, totals, kept)
    return output


def sampling_arguments(
    requests: Sequence[SampleRequest | None], vocab_size: int, device: torch.device
) -> SamplingArguments:
    """Copy to the device, at once, what the kernel needs of the rows that have requests."""
    ids: list[Int64] = []
    values: list[Float32] = []
    masks: list[Bits] = []
    end = mask_end = 0
    rows: list[RowParameters] = []
    for place, request in enumerate(requests):
        if request is None:
            continue
        begins = []
        for part_ids, part_values in changes(request, vocab_size):
            begins.append(end)
            ids.append(part_ids)
            values.append(part_values)
            end += len(part_ids)
        mask = mask_of(request.state, vocab_size)
        words = NO_MASK if mask is None else mask[: num_words(vocab_size)]
        rows.append(row_parameters(place, request, (*begins, end, mask_end, len(words) * WORD_BITS)))
        masks.append(words)
        mask_end += len(words)
    parts = (
        np.array(rows, np.float64),
        np.minimum(np.concatenate(ids), MAX_INT32).astype(np.int32),
        np.concatenate(values, dtype=np.float32),
        np.concatenate(masks, dtype=np.int32),
    )
    return SamplingArguments(*to_device_together(parts, device))


def row_parameters(place: int, request: SampleRequest, begins: Sequence[int]) -> RowParameters:
    sampling = request.state.sampling
    return RowParameters(
        place,
        sampling.temperature,
        sampling.repetition_penalty,
        min(sampling.top_k, MAX_INT32),
        request.state.top_p,
        float(np.float32(math.log(sampling.min_p))) if sampling.min_p else -math.inf,
        sampling.typical_p,
        request.state.random.at(request.index),
        sampling.raw_logprobs,
        *begins,
    )


def changes(request: SampleRequest, vocab_size: int) -> list[tuple[Int64, Float32]]:
    """The row's parts of `ids` int64 [n] and `values` float32 [n], in the order of RowParameters."""
    state = request.state
    banned = np.array(state.banned_ids_at(request.index), np.int64)
    counts = state.token_counts
    return [
        (state.bias_ids, state.bias),
        watermark(state, vocab_size),
        (banned, np.full(len(banned), -math.inf, np.float32)),
        (counts.ids, state.penalty()) if counts else (NO_IDS, NO_VALUES),
    ]


def to_device_together(parts: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Arrays [...] of float64, float32 or int32 → tensors [...] of these dtypes on the device, by one copy.
    Each begins at a multiple of ALIGNMENT bytes, so that Triton compiles once.
    """
    begins = np.cumsum([0, *(-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts)]).tolist()
    buffer = np.zeros(begins[-1] + ALIGNMENT, np.uint8)
    for begin, part in zip(begins, parts, strict=False):
        buffer[begin : begin + part.nbytes] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    copied = to_device(buffer, device)
    return [
        copied[begin : begin + part.nbytes].view(torch.from_numpy(part).dtype).view(part.shape)
        for begin, part in zip(begins, parts, strict=False)
    ]


def write_tops(
    output: SamplerOutput,
    logits: torch.Tensor,
    requests: Sequence[SampleRequest | None],
    scores: torch.Tensor,
    totals: torch.Tensor,
    kept: torch.Tensor,
) -> None:
    """Write the likeliest tokens of the rows that report them, by scores float32 [n, vocabulary], totals
    int64 [n] and numbers of kept tokens int32 [n] of the n rows that have requests; by logits float [rows,
    vocabulary] in rows that report the model's own log-probabilities.
    """
    places = [place for place, request in enumerate(requests) if request]
    states = [request.state for request in requests if request]
    chosen = [row for row, state in enumerate(states) if state.top_n_tokens]
    index = to_device(chosen, logits.device)
    where = to_device([places[row] for row in chosen], logits.device)
    num_tops = output.top_ids.shape[1]
    tops, top_ids = top_k(scores.index_select(0, index), num_tops)
    ranks = torch.arange(num_tops, device=logits.device)
    tops = tops.masked_fill(ranks >= kept[index][:, None], EXCLUDED) - log_of_weights(totals[index])[:, None]
    output.top_ids.index_copy_(0, where, top_ids)
    output.top_logprobs.index_copy_(0, where, tops)
    raw = [places[row] for row in chosen if states[row].sampling.raw_logprobs]
    if raw:
        write_raw_logprobs(output, logits, to_device(raw, logits.device))
