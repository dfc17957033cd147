"""The choice of tokens on CPU by the native kernels: all rows of a step in one call. What they choose is what
`sampling/sampler.py` does.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.batch.sampling_state import SampleRequest
from gpu_worker.engine.cpu import native
from gpu_worker.engine.sampling.multinomial import SamplerOutput, empty_output

Array = npt.NDArray[np.generic]
CPU = torch.device("cpu")
MAX_INT32 = 2**31 - 1


def kernels(logits: torch.Tensor) -> ctypes.CDLL | None:
    """None where the kernels cannot look at these logits."""
    fits = logits.device.type == "cpu" and logits.dtype in native.TYPE_CODES and logits.stride(1) == 1
    return native.library() if fits else None


def sample_natively(
    library: ctypes.CDLL, logits: torch.Tensor, requests: Sequence[SampleRequest | None]
) -> SamplerOutput:
    """logits [rows, vocabulary]; None is plainly the likeliest."""
    drawn = empty_output(
        len(requests), max((request.state.top_n_tokens for request in requests if request), default=0), CPU
    )
    kept: list[Array] = []
    columns = (
        (native.SampleRequestStruct * len(requests))(*(native_request(request, kept) for request in requests))
        if any(requests)
        else None
    )
    library.tf_sample(*logits_arguments(logits), columns, byref(output_pointers(drawn)))
    return drawn


def score_natively(
    library: ctypes.CDLL, logits: torch.Tensor, ids: torch.Tensor, num_tops: int
) -> SamplerOutput:
    """logits [tokens, vocabulary] → what the model says of ids int64 [tokens], one in place of each, and its
    likeliest there.
    """
    told = empty_output(len(ids), num_tops, CPU)
    told.ids.copy_(ids)
    library.tf_logprobs(*logits_arguments(logits), byref(output_pointers(told)))
    return told


def logits_arguments(logits: torch.Tensor) -> tuple[int, ...]:
    return (
        native.TYPE_CODES[logits.dtype],
        torch.get_num_threads(),
        logits.data_ptr(),
        *logits.shape,
        logits.stride(0),
    )


def output_pointers(drawn: SamplerOutput) -> native.SamplerOutputStruct:
    return native.SamplerOutputStruct(
        *(native_request.data_ptr() for native_request in drawn), drawn.top_ids.shape[1]
    )


def native_request(request: SampleRequest | None, kept: list[Array]) -> native.SampleRequestStruct:
    """`kept` keeps the arrays that it points to."""
    if request is None:
        return native.SampleRequestStruct()
    state, sampling, counts, grammar = (
        request.state,
        request.state.sampling,
        request.state.token_counts,
        request.state.grammar,
    )
    banned = state.banned_ids_at(request.index)
    bias, mask = (grammar.bias(), grammar.mask()) if grammar else (None, None)

    def listed(array: Array | None) -> tuple[int, int]:
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
        *listed(state.bias_ids),
        *listed(state.bias),
        *listed(np.array(banned, np.int64) if banned else None),
        *listed(counts.ids if counts else None),
        counts.table.shape[1] if counts else 0,
        *listed(bias),
        *listed(mask),
    )
