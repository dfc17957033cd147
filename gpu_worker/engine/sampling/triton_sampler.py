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
from gpu_worker.engine.batch.sampling_state import Float32, Float64, Int64, SampleRequest, SamplingState
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


PLACE, TOP_P, UNIFORM, FIRST_PART, MASK, NUM_MASKED = (
    RowParameters._fields.index(name)
    for name in ("place", "top_p", "uniform", "biased", "mask", "num_masked")
)
NUM_PARTS = 4
NO_CHANGES = ((NO_IDS, NO_VALUES),) * NUM_PARTS


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
    places = [place for place, request in enumerate(requests) if request]
    chosen = [request for request in requests if request]
    parts = [changes(request, vocab_size) for request in chosen]
    masks = [mask_of(request.state, vocab_size) for request in chosen]
    words = [NO_MASK if mask is None else mask[: num_words(vocab_size)] for mask in masks]
    # each part begins where the one before it ends, whichever row has that
    ends = np.cumsum([len(ids) for row in parts for ids, _ in row]).reshape(len(chosen), NUM_PARTS)
    mask_ends = np.cumsum([len(own) for own in words])
    table = np.concatenate([row_parameters(request.state) for request in chosen])
    table = table.reshape(len(chosen), len(RowParameters._fields))
    table[:, PLACE] = places
    table[:, TOP_P] = [request.state.top_p for request in chosen]
    table[:, UNIFORM] = [request.state.random.at(request.index) for request in chosen]
    table[:, FIRST_PART + 1 : FIRST_PART + 1 + NUM_PARTS] = ends
    table[1:, FIRST_PART] = ends[:-1, -1]
    table[1:, MASK] = mask_ends[:-1]
    table[:, NUM_MASKED] = [len(own) * WORD_BITS for own in words]
    every = [part for row in parts for part in row if len(part[0])] or [(NO_IDS, NO_VALUES)]
    arrays = (
        table,
        np.minimum(np.concatenate([ids for ids, _ in every]), MAX_INT32).astype(np.int32),
        np.concatenate([values for _, values in every], dtype=np.float32),
        np.concatenate(words, dtype=np.int32),
    )
    return SamplingArguments(*to_device_together(arrays, device))


def row_parameters(state: SamplingState) -> Float64:
    """`RowParameters` of a row float64 [16], with zeros in place of what changes with each token."""
    if state.parameters is None:
        sampling = state.sampling
        row = RowParameters(
            place=0,
            temperature=sampling.temperature,
            repetition_penalty=sampling.repetition_penalty,
            top_k=min(sampling.top_k, MAX_INT32),
            top_p=0,
            lowest=float(np.float32(math.log(sampling.min_p))) if sampling.min_p else -math.inf,
            typical_p=sampling.typical_p,
            uniform=0,
            raw_logprobs=sampling.raw_logprobs,
            biased=0,
            green=0,
            banned=0,
            history=0,
            history_end=0,
            mask=0,
            num_masked=0,
        )
        state.parameters = np.array(row, np.float64)
    return state.parameters


def changes(request: SampleRequest, vocab_size: int) -> Sequence[tuple[Int64, Float32]]:
    """The row's parts of `ids` int64 [n] and `values` float32 [n], in the order of RowParameters."""
    state = request.state
    banned, counts = state.banned_ids_at(request.index), state.token_counts
    if not (banned or counts or len(state.bias_ids) or state.sampling.watermark_delta):
        return NO_CHANGES
    return (
        (state.bias_ids, state.bias),
        watermark(state, vocab_size),
        (np.array(banned, np.int64), np.full(len(banned), -math.inf, np.float32)),
        (counts.ids, state.penalty()) if counts else (NO_IDS, NO_VALUES),
    )


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
