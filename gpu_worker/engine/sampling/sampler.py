"""The sampler: logits to tokens. `sample` is the entry.

On CPU native kernels sample all rows in one call (native_sampler.py), on CUDA one Triton kernel does
(triton_sampler.py): the work is only queued, without waiting for the device. Else torch samples, and tests
compare both with it. Rows are grouped by the function that samples them, and each group passes, in this
order: bias, bans, penalties and grammar (penalties.py), temperature (here), truncation by top-k, top-p, min-p
and typical-p (truncation.py), and the draw of a token (multinomial.py).
"""

from collections.abc import Callable, Sequence

import torch

from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.batch.sampling_state import SampleRequest, SamplingState
from gpu_worker.engine.sampling import native_sampler
from gpu_worker.engine.sampling.multinomial import (
    EXCLUDED,
    SamplerOutput,
    empty_output,
    make_output,
    multinomial_sample,
    put_into,
    to_weights,
    write_raw_logprobs,
)
from gpu_worker.engine.sampling.penalties import adjust_scores
from gpu_worker.engine.sampling.triton_sampler import greedy_output, sample_on_cuda
from gpu_worker.engine.sampling.truncation import SamplingTensors, truncated_sample, typical_sample

SampleFunction = Callable[[torch.Tensor, SamplingTensors, int], SamplerOutput]
"""scores float32 [rows, vocabulary] with the likeliest at 0, parameters, number of top log-probabilities →
sampled tokens.
"""


@torch.inference_mode()
def sample(logits: torch.Tensor, requests: Sequence[SampleRequest | None]) -> SamplerOutput:
    """logits float [rows, vocabulary] → ids int64 [rows] and their log-probabilities float32 [rows].

    One request for each row; None is greedy without penalties.
    """
    output = sample_on_device(logits, requests)
    if any(request and request.state.sampling.report_logits for request in requests):
        for raw in (True, False):
            write_logits(output, logits, requests, raw)
    return output


def sample_on_device(logits: torch.Tensor, requests: Sequence[SampleRequest | None]) -> SamplerOutput:
    """`sample` by what the device has: logits float [rows, vocabulary] → ids int64 [rows], log-probabilities
    float32 [rows].
    """
    library = native_sampler.kernels(logits)
    if library:
        return native_sampler.sample_natively(library, logits, requests)
    if logits.is_cuda and any(requests):
        return sample_on_cuda(logits, requests)
    return sample_in_groups(logits, requests)


def write_logits(
    output: SamplerOutput, logits: torch.Tensor, requests: Sequence[SampleRequest | None], raw: bool
) -> None:
    """Replace the log-probabilities of the rows that report logits, of logits float [rows, vocabulary]: with
    `raw` those that report the model's own, else those that report processed ones, after penalties and
    temperature. Tokens that truncation excludes keep -inf.
    """
    found = {row: request for row, request in enumerate(requests) if request and reports(request, raw)}
    if not found:
        return
    rows = to_device([*found], logits.device)
    scores = logits.index_select(0, rows).to(torch.float32, copy=True)
    if not raw:
        states = [request.state for request in found.values()]
        adjust_scores(scores, states, [request.index for request in found.values()])
        scores.div_(temperatures_of(states, scores.device))
    tops = output.top_logprobs.index_select(0, rows)
    top_scores = scores.gather(1, output.top_ids.index_select(0, rows))
    output.logprobs.index_copy_(0, rows, scores.gather(1, output.ids[rows][:, None])[:, 0])
    output.top_logprobs.index_copy_(0, rows, torch.where(tops == EXCLUDED, tops, top_scores))


def sample_in_groups(logits: torch.Tensor, requests: Sequence[SampleRequest | None]) -> SamplerOutput:
    """`sample` by torch: logits float [rows, vocabulary] → ids int64 [rows], log-probabilities float32
    [rows].
    """
    if not any(requests):
        return greedy_output(logits)
    groups: dict[SampleFunction | None, list[int]] = {}
    for place, request in enumerate(requests):
        groups.setdefault(sample_function_of(request.state) if request else None, []).append(place)
    num_tops = max(request.state.top_n_tokens for request in requests if request)
    output = empty_output(len(requests), num_tops, logits.device)
    for function, places in groups.items():
        index = to_device(places, logits.device)
        group = [request for place in places if (request := requests[place])]
        put_into(output, index, sample_group(logits.index_select(0, index), function, group))
    return output


def sample_function_of(state: SamplingState) -> SampleFunction:
    """Choose the function for a row's next token: functions differ in the part of the vocabulary they
    need.
    """
    sampling = state.sampling
    if sampling.temperature == 0:
        return greedy_sample
    if sampling.typical_p < 1:
        return typical_sample
    return truncated_sample if sampling.top_k or state.top_p < 1 or sampling.min_p else untruncated_sample


def sample_group(
    logits: torch.Tensor, function: SampleFunction | None, requests: Sequence[SampleRequest]
) -> SamplerOutput:
    """logits float [rows, vocabulary] of rows with one function → ids int64 [rows], log-probabilities float32
    [rows]. Without a function the rows are greedy, and have no requests.
    """
    if function is None:
        return greedy_output(logits)
    states = [request.state for request in requests]
    scores = logits.to(torch.float32, copy=True)
    adjust_scores(scores, states, [request.index for request in requests])
    apply_temperature(scores, states)
    num_tops = max(state.top_n_tokens for state in states)
    output = function(scores, sampling_tensors(requests, scores.device), num_tops)
    raw = [row for row, state in enumerate(states) if state.sampling.raw_logprobs]
    if raw:
        write_raw_logprobs(output, logits, to_device(raw, logits.device))
    return output


def apply_temperature(scores: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Divide scores float32 [rows, vocabulary], in place. Before that the likeliest of each row becomes 0, so
    that no temperature makes a score overflow.
    """
    scores.sub_(scores.amax(-1, keepdim=True))
    scores.div_(temperatures_of(states, scores.device))


def reports(request: SampleRequest, raw: bool) -> bool:
    """Whether a row reports logits, raw or processed."""
    sampling = request.state.sampling
    return sampling.report_logits and sampling.raw_logprobs == raw


def temperatures_of(states: Sequence[SamplingState], device: torch.device) -> torch.Tensor:
    """Return the temperatures float32 [rows, 1] of the rows; 1 for greedy ones."""
    return to_device([state.sampling.temperature or 1.0 for state in states], device)[:, None]


def sampling_tensors(requests: Sequence[SampleRequest], device: torch.device) -> SamplingTensors:
    """Return the parameters of the rows as tensors [rows, 1] on the device: top_k int64, others float64."""
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


def greedy_sample(scores: torch.Tensor, tensors: SamplingTensors, num_tops: int) -> SamplerOutput:
    """scores float32 [rows, vocabulary] → the likeliest tokens after penalties."""
    totals = to_weights(scores).sum(-1, keepdim=True)
    return make_output(scores, totals, scores.max(-1, keepdim=True).indices, num_tops)


def untruncated_sample(scores: torch.Tensor, tensors: SamplingTensors, num_tops: int) -> SamplerOutput:
    """scores float32 [rows, vocabulary] → tokens sampled from the whole vocabulary."""
    return multinomial_sample(scores, tensors.uniforms, num_tops)
