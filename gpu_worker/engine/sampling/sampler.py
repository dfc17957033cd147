"""The choice of rows that ask for something, in the order that the docstring of `Sampling` lists."""

from collections.abc import Callable, Sequence

import torch

from gpu_worker.engine.batch.sampling_state import SampleRequest, SamplingState
from gpu_worker.engine.batch.to_device import to_device
from gpu_worker.engine.sampling.multinomial import SamplerOutput, make_output, multinomial_sample, to_weights
from gpu_worker.engine.sampling.penalties import adjust_scores
from gpu_worker.engine.sampling.truncation import SamplingTensors, truncated_sample, typical_sample

SampleFunction = Callable[[torch.Tensor, SamplingTensors, int], SamplerOutput]
"""Scores float32 [rows, vocabulary] with the likeliest at 0, limits, number of the likeliest to be told →
drawn.
"""


def sample_function_of(state: SamplingState) -> SampleFunction:
    """Of the next token. Rows of different ways look at different parts of the vocabulary."""
    sampling = state.sampling
    if sampling.temperature == 0:
        return greedy_sample
    if sampling.typical_p < 1:
        return typical_sample
    return truncated_sample if sampling.top_k or state.top_p < 1 or sampling.min_p else untruncated_sample


def sample_group(
    logits: torch.Tensor, way: SampleFunction, requests: Sequence[SampleRequest]
) -> SamplerOutput:
    """logits [rows, vocabulary], of rows of one way."""
    states = [request.state for request in requests]
    scores = logits.to(torch.float32, copy=True)
    adjust_scores(scores, states, [request.index for request in requests])
    apply_temperature(scores, states)
    chosen = way(
        scores, sampling_tensors(requests, scores.device), max(state.top_n_tokens for state in states)
    )
    own = [row for row, state in enumerate(states) if state.sampling.raw_logprobs]
    return with_raw_logprobs(chosen, logits, to_device(own, logits.device)) if own else chosen


def apply_temperature(scores: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """In place: the likeliest of each row is 0 then, and no temperature makes the others overflow."""
    scores.sub_(scores.amax(-1, keepdim=True))
    temperatures = to_device([state.sampling.temperature or 1.0 for state in states], scores.device)
    scores.div_(temperatures[:, None])


def sampling_tensors(requests: Sequence[SampleRequest], device: torch.device) -> SamplingTensors:
    states = [request.state for request in requests]
    top_k, top_p = [state.sampling.top_k for state in states], [state.top_p for state in states]
    others = [
        [
            request.state.sampling.min_p,
            request.state.sampling.typical_p,
            request.state.random.at(request.index),
        ]
        for request in requests
    ]
    return SamplingTensors(
        to_device(top_k, device)[:, None] if any(top_k) else None,
        to_device(top_p, device, torch.float64)[:, None] if min(top_p) < 1 else None,
        *to_device(others, device, torch.float64)[..., None].unbind(1),
    )


def greedy_sample(scores: torch.Tensor, limits: SamplingTensors, num_tops: int) -> SamplerOutput:
    return make_output(
        scores, to_weights(scores).sum(-1, keepdim=True), scores.max(-1, keepdim=True).indices, num_tops
    )


def untruncated_sample(scores: torch.Tensor, limits: SamplingTensors, num_tops: int) -> SamplerOutput:
    return multinomial_sample(scores, limits.uniforms, num_tops)


def with_raw_logprobs(chosen: SamplerOutput, logits: torch.Tensor, rows: torch.Tensor) -> SamplerOutput:
    """With the model's own log-probabilities for these rows."""
    scores = logits[rows].to(torch.float32)
    scores.sub_(scores.amax(-1, keepdim=True))
    own = make_output(
        scores, to_weights(scores).sum(-1, keepdim=True), chosen.ids[rows, None], chosen.top_ids.shape[1]
    )
    for column, values in zip(chosen, own, strict=True):
        column[rows] = values
    return chosen
