"""Logits to tokens: chosen on the device, then read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gpu_worker.engine.batch.outcome import PromptLogprobs, TopLogprobs
from gpu_worker.engine.batch.sampling_state import SampleRequest
from gpu_worker.engine.batch.to_device import to_device
from gpu_worker.engine.sampling import cpu_sampler
from gpu_worker.engine.sampling.multinomial import SamplerOutput, empty_output
from gpu_worker.engine.sampling.sampler import SampleFunction, sample_function_of, sample_group


@dataclass(frozen=True, slots=True)
class StepSamples:
    """What a step sampled, on the host; `tops` by the place of the sample. And what it tells of prompts, in
    the order of its parts.
    """

    ids: list[int]
    logprobs: list[float]
    top_logprobs: dict[int, TopLogprobs] = field(default_factory=dict)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


@torch.inference_mode()
def sample(logits: torch.Tensor, requests: Sequence[SampleRequest | None]) -> SamplerOutput:
    """logits [samples, vocabulary]; None is plainly the likeliest."""
    library = cpu_sampler.kernels(logits)
    return (
        cpu_sampler.sample_natively(library, logits, requests)
        if library
        else sample_in_groups(logits, requests)
    )


def sample_in_groups(logits: torch.Tensor, requests: Sequence[SampleRequest | None]) -> SamplerOutput:
    """Rows that choose in the same way are chosen for together. On CUDA the work is only queued: nothing here
    waits for the device.
    """
    if not any(requests):
        return greedy_output(logits)
    groups: dict[SampleFunction | None, list[int]] = {}
    for place, request in enumerate(requests):
        groups.setdefault(sample_function_of(request.state) if request else None, []).append(place)
    sampled = empty_output(
        len(requests), max(request.state.top_n_tokens for request in requests if request), logits.device
    )
    for way, places in groups.items():
        sample_into(
            sampled, to_device(places, logits.device), logits, way, [requests[place] for place in places]
        )
    return sampled


def sample_into(
    sampled: SamplerOutput,
    places: torch.Tensor,
    logits: torch.Tensor,
    way: SampleFunction | None,
    requests: Sequence[SampleRequest | None],
) -> None:
    """Chooses for the rows at `places`."""
    rows = logits.index_select(0, places)
    drawn = (
        greedy_output(rows)
        if way is None
        else sample_group(rows, way, [request for request in requests if request])
    )
    for column, values in zip(sampled, drawn, strict=True):
        (column if column.dim() == 1 else column[:, : values.shape[1]]).index_copy_(0, places, values)


def read(drawn: SamplerOutput, requests: Sequence[SampleRequest | None]) -> StepSamples:
    """Drawn columns that are on the host."""
    ids, logprobs, top_ids, top_logprobs = (column.tolist() for column in drawn)
    asked = {
        place: request.state.top_n_tokens
        for place, request in enumerate(requests)
        if request and request.state.top_n_tokens
    }
    return StepSamples(
        ids,
        logprobs,
        {place: TopLogprobs(top_ids[place][:num], top_logprobs[place][:num]) for place, num in asked.items()},
    )


def greedy_output(logits: torch.Tensor) -> SamplerOutput:
    ids, logprobs = greedy(logits)
    return SamplerOutput(ids, logprobs, ids[:, None][:, :0], logprobs[:, None][:, :0])


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [samples, vocabulary] → ids int64 [samples], natural logarithms of their probabilities float32
    [samples].
    """
    if logits.is_cuda:
        from gpu_worker.engine.cuda.kernels.greedy import (
            greedy_rows,
        )  # Triton comes with torch's builds for CUDA only

        return greedy_rows(logits)
    best, ids = logits.max(-1)
    below = logits.to(torch.float32, copy=True).sub_(
        best.float()[:, None]
    )  # in place: another buffer of this size costs page faults
    return ids, below.exp_().sum(-1).log_().neg_()
