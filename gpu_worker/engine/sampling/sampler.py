"""The sampler: logits to tokens. `sample` is the entry.

On CPU native kernels sample all rows in one call, on CUDA one Triton kernel does, whatever their parameters:
the work is only queued, without waiting for the device. Rows that are greedy without penalties have a kernel
of their own. Else torch samples, and tests compare both with it: logit bias and watermark, bans, penalties
and masks, temperature, truncation by top-k, top-p, min-p and typical-p, and the draw of a token, in this
order.

A token is drawn by inverse transform, with one uniform number for each row. Probabilities are summed as
integers, whose sum is the same in every order: so a token depends on its own row and number alone, in any
batch and on any device. Of two equally likely tokens the lower id comes first.
"""

import ctypes
import math
from collections.abc import Sequence
from ctypes import byref
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.batch.sampling_state import Float32, Float64, Int64, SampleRequest, SamplingState
from gpu_worker.engine.cpu import native
from gpu_worker.engine.sampling.grammar import WORD_BITS, mask_of, num_words

LIKELIEST_WEIGHT = 2.0**40
"""The weight of a row's likeliest token: 2**23 equally likely tokens fit into an int64."""
EXCLUDED = float("-inf")


def top_k(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scores float32 [rows, vocabulary], none above 0 → scores and ids int64 of the `width` likeliest, [rows,
    width].
    """
    if not width:
        return scores[:, :0], scores[:, :0].long()
    keys = scores.view(torch.int32) & 0x7FFFFFFF  # they rise from 0 as scores fall
    places = keys.long() << 32 | torch.arange(scores.shape[1], device=scores.device)
    ids = places.topk(width, largest=False).values & 0xFFFFFFFF
    return scores.gather(1, ids), ids


class SamplerOutput(NamedTuple):
    """Sampled tokens, or tokens of a prompt: ids int64 [rows], logprobs float32 [rows]; and the likeliest
    tokens in their place: top_ids int64 [rows, n], top_logprobs float32 [rows, n].
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def empty_output(num_rows: int, num_tops: int, device: torch.device) -> SamplerOutput:
    """Return zeros: ids int64 [rows], logprobs float32 [rows], and both [rows, num_tops], column by column in
    memory.
    """
    ids = torch.zeros(1 + num_tops, num_rows, dtype=torch.int64, device=device)
    logprobs = torch.zeros(1 + num_tops, num_rows, dtype=torch.float32, device=device)
    return SamplerOutput(ids[0], logprobs[0], ids[1:].T, logprobs[1:].T)


def to_weights(scores: torch.Tensor) -> torch.Tensor:
    """scores float32 [rows, vocabulary], the likeliest of a row at 0 → weights int64 [rows, vocabulary]:
    `exp(scores)` in units of 2**-40.
    """
    return scores.exp().mul_(LIKELIEST_WEIGHT).long()


def log_of_weights(weights: torch.Tensor) -> torch.Tensor:
    """weights int64 [...] → their natural logarithms float32 [...], in the units of scores."""
    return weights.double().div_(LIKELIEST_WEIGHT).log_().float()


class DrawParameters(NamedTuple):
    """Parameters of rows, each [rows, 1]: top_k int64, by_likelihood bool, the others float64.

    Attributes:
        top_k, top_p, min_p, typical_p: 0, 1, 0 and 1 keep all tokens.
        by_likelihood: the likeliest tokens come first in the draw, else the lowest ids.
        uniforms: random numbers in [0, 1); 0 draws the first token that is kept.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor
    by_likelihood: torch.Tensor
    uniforms: torch.Tensor


def draw(scores: torch.Tensor, parameters: DrawParameters, num_tops: int) -> SamplerOutput:
    """Draw tokens by inverse transform, of those that truncation keeps: scores float32 [rows, vocabulary],
    the likeliest of a row at 0.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    left_out = torch.ones_like(ordered, dtype=torch.bool)
    left_out.scatter_(1, order, ~is_likely(ordered, parameters))
    is_typical = parameters.typical_p < 1
    kept = scores.masked_fill(left_out, EXCLUDED)
    kept = kept.masked_fill(is_typical & is_atypical(kept, parameters.typical_p), EXCLUDED)
    weights = to_weights(kept)
    cumulative = torch.where(parameters.by_likelihood, weights.gather(1, order), weights).cumsum(-1)
    totals = cumulative[:, -1:]
    wanted = torch.minimum((parameters.uniforms * totals).long(), totals - 1)
    places = torch.searchsorted(cumulative, wanted, right=True)
    places.clamp_(max=scores.shape[1] - 1)  # beyond the end only where scores are NaN
    ids = torch.where(parameters.by_likelihood, order.gather(1, places), places)
    top_ids = top_k(torch.where(is_typical, kept, scores), num_tops)[1]
    total = log_of_weights(totals)
    return SamplerOutput(
        ids[:, 0], (scores.gather(1, ids) - total)[:, 0], top_ids, kept.gather(1, top_ids) - total
    )


def is_likely(ordered: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """scores float32 [rows, vocabulary] in falling order → bool [rows, vocabulary]: the tokens that top-k,
    top-p and min-p keep.

    Top-k keeps the tokens that are as likely as the k-th one. Top-p (arXiv:1904.09751) keeps the fewest that
    have this share of what top-k kept. Min-p (arXiv:2407.01082) keeps the tokens that have this share of the
    likeliest one's probability.
    """
    _, top_p, min_p, *_ = parameters
    kth = ordered.gather(1, parameters.top_k.clamp(1, ordered.shape[1]) - 1)
    in_k = (ordered >= kth) | (parameters.top_k == 0)
    weights = to_weights(ordered)
    wanted = (top_p * weights.masked_fill(~in_k, 0).sum(-1, keepdim=True)).ceil().long().clamp_(min=1)
    in_p = (weights.cumsum(-1) - weights < wanted) | (top_p >= 1)
    return in_k & in_p & (ordered >= min_p.log().float())


def is_atypical(scores: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """scores float32 [rows, vocabulary], share float64 [rows, 1] → bool [rows, vocabulary]: the tokens that
    locally typical sampling (arXiv:2202.00666) leaves out.

    It keeps the fewest tokens with that share whose information is nearest to the entropy, and those as near
    as the last of them. A row's likeliest score is 0: information and entropy both lack the logarithm of the
    total.
    """
    weights = to_weights(scores)
    total = weights.sum(-1, keepdim=True)
    entropy = (scores.exp() * -scores * LIKELIEST_WEIGHT).nan_to_num_(0).long().sum(-1, keepdim=True) / total
    distances = (scores + entropy).float().abs()
    nearest, order = distances.sort(dim=-1)
    wanted = (share * total).ceil().long().clamp_(min=1)
    last = torch.searchsorted(weights.gather(1, order).cumsum(-1), wanted)
    return distances > nearest.gather(1, last.clamp_(max=scores.shape[1] - 1))


def raw_logprobs(logits: torch.Tensor, ids: torch.Tensor, num_tops: int) -> SamplerOutput:
    """logits float [rows, vocabulary] → the model's own log-probabilities of ids int64 [rows], and of the
    `num_tops` likeliest tokens in place of each.
    """
    scores = logits.to(torch.float32, copy=True)
    scores.sub_(scores.amax(-1, keepdim=True))
    total = log_of_weights(to_weights(scores).sum(-1, keepdim=True))
    top_scores, top_ids = top_k(scores, num_tops)
    own = scores.gather(1, ids[:, None]) - total
    return SamplerOutput(ids, own[:, 0], top_ids, top_scores - total)


def write_raw_logprobs(output: SamplerOutput, logits: torch.Tensor, rows: torch.Tensor) -> None:
    """Replace log-probabilities in rows int64 [n] by the model's own, of logits float [rows, vocabulary]."""
    put_into(output, rows, raw_logprobs(logits[rows], output.ids[rows], output.top_ids.shape[1]))


def put_into(output: SamplerOutput, places: torch.Tensor, sampled: SamplerOutput) -> None:
    """Replace the rows at places int64 [group]."""
    for column, values in zip(output, sampled, strict=True):
        (column if column.dim() == 1 else column[:, : values.shape[1]]).index_copy_(0, places, values)


HASH_KEY = 15485863
"""TGI's: a prime that spreads token ids over the seeds."""
NO_IDS = np.zeros(0, np.int64)
NO_VALUES = np.zeros(0, np.float32)


def green_ids(previous: int, gamma: float, vocab_size: int) -> Int64:
    """The ids int64 [vocab_size * gamma] that are green after the token `previous`. Torch's generator on the
    CPU draws them, whatever the device, so that every worker finds the same ones.
    """
    generator = torch.Generator().manual_seed(HASH_KEY * previous)
    order = torch.randperm(vocab_size, generator=generator)
    return order[: int(vocab_size * gamma)].numpy()


def watermark(state: SamplingState, vocab_size: int) -> tuple[Int64, Float32]:
    """What a row's watermark adds to its logits, as ids int64 [n] and values float32 [n].

    Watermark of arXiv:2301.10226, as TGI has it: part of the vocabulary is green, and favoured. The token
    before decides which part, so that a text shows by itself how many of its tokens are green.
    """
    sampling = state.sampling
    if not sampling.watermark_delta:
        return NO_IDS, NO_VALUES
    green = green_ids(state.tail[-1], sampling.watermark_gamma, vocab_size)
    return green, np.full(len(green), sampling.watermark_delta, np.float32)


def biases(state: SamplingState, vocab_size: int) -> tuple[Int64, Float32]:
    """The logit bias and the watermark of a row, as ids int64 [n] and values float32 [n] to add to its
    logits.
    """
    if not state.sampling.watermark_delta:
        return state.bias_ids, state.bias
    green, delta = watermark(state, vocab_size)
    return np.concatenate([state.bias_ids, green]), np.concatenate([state.bias, delta])


def adjust_scores(
    scores: torch.Tensor, states: Sequence[SamplingState], token_indices: Sequence[int]
) -> None:
    """Change scores float32 [rows, vocabulary] in place. `token_indices`: the index of each row's next token.
    Ids outside the model's vocabulary are ignored.

    The repetition penalty is that of CTRL (arXiv:1909.05858); the frequency and presence penalties are
    subtracted after it. Tokens beyond the end of a mask stay as they are.
    """
    size, device = scores.shape[1], scores.device
    for row, state, index in zip(scores, states, token_indices, strict=True):
        ids, values = biases(state, size)
        known = ids < size
        row.index_add_(0, to_device(ids[known], device), to_device(values[known], device))
        banned = [token for token in state.banned_ids_at(index) if token < size]
        row[to_device(banned, device, torch.int64)] = float("-inf")
        if counts := state.token_counts:
            known, factor = counts.ids < size, state.sampling.repetition_penalty
            where = to_device(counts.ids[known], device)
            found = torch.where(row[where] < 0, row[where] * factor, row[where] / factor)
            row[where] = found - to_device(state.penalty()[known], device)
        if (mask := mask_of(state, size)) is not None:
            masked = np.unpackbits(mask.view(np.uint8), bitorder="little")[:size] == 0
            row[: len(masked)].masked_fill_(to_device(masked, device), float("-inf"))


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
    library = kernels(logits)
    if library:
        return sample_natively(library, logits, requests)
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
