"""Sampling on CPU by the native kernels: all rows of a step in one call. They sample the same tokens as torch
does in sampler.py.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.batch.sampling_state import SampleRequest
from gpu_worker.engine.cpu import native
from gpu_worker.engine.sampling.grammar import mask_of
from gpu_worker.engine.sampling.multinomial import SamplerOutput, empty_output
from gpu_worker.engine.sampling.penalties import biases

Array = npt.NDArray[np.generic]
CPU = torch.device("cpu")
MAX_INT32 = 2**31 - 1


def kernels(logits: torch.Tensor) -> ctypes.CDLL | None:
    """logits float [rows, vocabulary] → the library, or None if its kernels cannot read them: another dtype
    than float32, bfloat16 and float16, another device, strided rows.
    """
    fits = logits.device.type == "cpu" and logits.dtype in native.TYPE_CODES and logits.stride(1) == 1
    return native.library() if fits else None


def sample_natively(
    library: ctypes.CDLL, logits: torch.Tensor, requests: Sequence[SampleRequest | None]
) -> SamplerOutput:
    """logits float [rows, vocabulary] → ids int64 [rows], log-probabilities float32 [rows]. A request of None
    is greedy without penalties.
    """
    output = empty_output(
        len(requests), max((request.state.top_n_tokens for request in requests if request), default=0), CPU
    )
    kept: list[Array] = []
    columns = (
        (native.SampleRequestStruct * len(requests))(
            *(native_request(request, logits.shape[1], kept) for request in requests)
        )
        if any(requests)
        else None
    )
    library.tf_sample(*logits_arguments(logits), columns, byref(output_pointers(output)))
    return output


def score_natively(
    library: ctypes.CDLL, logits: torch.Tensor, ids: torch.Tensor, num_tops: int
) -> SamplerOutput:
    """logits float [tokens, vocabulary], ids int64 [tokens] → log-probabilities float32 [tokens] of these
    ids, and of the `num_tops` likeliest tokens in place of each.
    """
    output = empty_output(len(ids), num_tops, CPU)
    output.ids.copy_(ids)
    library.tf_logprobs(*logits_arguments(logits), byref(output_pointers(output)))
    return output


def logits_arguments(logits: torch.Tensor) -> tuple[int, ...]:
    """logits float [rows, vocabulary] → the arguments by which the kernels read them."""
    return (
        native.TYPE_CODES[logits.dtype],
        torch.get_num_threads(),
        logits.data_ptr(),
        *logits.shape,
        logits.stride(0),
    )


def output_pointers(output: SamplerOutput) -> native.SamplerOutputStruct:
    return native.SamplerOutputStruct(*(column.data_ptr() for column in output), output.top_ids.shape[1])


def native_request(
    request: SampleRequest | None, vocab_size: int, kept: list[Array]
) -> native.SampleRequestStruct:
    """Build the struct of one row; `kept` keeps the arrays alive that it points to."""
    if request is None:
        return native.SampleRequestStruct()
    state = request.state
    sampling, counts = state.sampling, state.token_counts
    banned = state.banned_ids_at(request.index)
    bias_ids, bias = biases(state, vocab_size)

    def pointer_and_size(array: Array | None) -> tuple[int, int]:
        if array is None or not array.size:
            return 0, 0
        kept.append(array := np.ascontiguousarray(array))
        return array.ctypes.data, array.size

    return native.SampleRequestStruct(
        True,
        state.top_n_tokens,
        sampling.raw_logprobs,
        min(sampling.top_k, MAX_INT32),
        sampling.temperature,
        sampling.repetition_penalty,
        state.top_p,
        sampling.min_p,
        sampling.typical_p,
        state.random.at(request.index),
        sampling.frequency_penalty,
        sampling.presence_penalty,
        sampling.relative_frequency_penalty / counts.num_tokens if counts else 0.0,
        *pointer_and_size(bias_ids),
        *pointer_and_size(bias),
        *pointer_and_size(np.array(banned, np.int64) if banned else None),
        *pointer_and_size(counts.ids if counts else None),
        counts.table.shape[1] if counts else 0,
        *pointer_and_size(mask_of(state, vocab_size)),
    )
