"""The sampler: logits to tokens. `sample` is the entry.

On CPU native kernels sample all rows in one call (native_sampler.py), on CUDA one Triton kernel does
(triton_sampler.py): the work is only queued, without waiting for the device. Else torch samples, and tests
compare both with it: bias, bans, penalties and grammar (penalties.py), temperature (here), truncation by
top-k, top-p, min-p and typical-p and the draw of a token (multinomial.py), in this order.
"""

from collections.abc import Sequence

import torch

from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.batch.sampling_state import SampleRequest, SamplingState
from gpu_worker.engine.sampling import native_sampler
from gpu_worker.engine.sampling.multinomial import (
    EXCLUDED,
    DrawParameters,
    SamplerOutput,
    draw,
    empty_output,
    put_into,
    write_raw_logprobs,
)
from gpu_worker.engine.sampling.penalties import adjust_scores
from gpu_worker.engine.sampling.triton_sampler import greedy, greedy_output, sample_on_cuda


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
    return sample_by_torch(logits, requests)


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


def sample_by_torch(logits: torch.Tensor, requests: Sequence[SampleRequest | None]) -> SamplerOutput:
    """`sample` by torch: logits float [rows, vocabulary] → ids int64 [rows], log-probabilities float32
    [rows].
    """
    if not any(requests):
        return greedy_output(logits)
    rows = to_device([row for row, request in enumerate(requests) if request], logits.device)
    chosen = [request for request in requests if request]
    output = empty_output(len(requests), max(request.state.top_n_tokens for request in chosen), logits.device)
    if len(chosen) < len(requests):
        for column, values in zip(output, greedy(logits), strict=False):
            column.copy_(values)
    put_into(output, rows, sample_requested(logits.index_select(0, rows), chosen, output.top_ids.shape[1]))
    return output


def sample_requested(logits: torch.Tensor, requests: Sequence[SampleRequest], num_tops: int) -> SamplerOutput:
    """logits float [rows, vocabulary] → ids int64 [rows], log-probabilities float32 [rows]."""
    states = [request.state for request in requests]
    scores = logits.to(torch.float32, copy=True)
    adjust_scores(scores, states, [request.index for request in requests])
    apply_temperature(scores, states)
    output = draw(scores, draw_parameters(requests, scores.device), num_tops)
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


def draw_parameters(requests: Sequence[SampleRequest], device: torch.device) -> DrawParameters:
    """The parameters of the rows on the device. A greedy row draws the likeliest of all tokens."""
    rows = []
    for state, index in ((request.state, request.index) for request in requests):
        one, top_p = state.sampling, state.top_p
        truncates = bool(one.top_k) or top_p < 1 or one.min_p > 0
        drawn = (one.top_k, top_p, one.min_p, one.typical_p, truncates and one.typical_p == 1)
        rows.append((*drawn, state.random.at(index)) if one.temperature else (0, 1, 0, 1, True, 0))
    top_k, *shares, by_likelihood, uniforms = ([*column] for column in zip(*rows, strict=True))
    top_p, min_p, typical_p, numbers = to_device([*shares, uniforms], device, torch.float64)[..., None]
    return DrawParameters(
        to_device(top_k, device, torch.int64)[:, None],
        top_p,
        min_p,
        typical_p,
        to_device(by_likelihood, device, torch.bool)[:, None],
        numbers,
    )
