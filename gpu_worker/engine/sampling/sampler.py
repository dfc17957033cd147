"""The sampler: logits to tokens. `sample` is the entry.

On CPU native kernels sample all rows in one call, on CUDA one Triton kernel does, whatever their parameters:
the work is only queued, without waiting for the device. Rows that are greedy without penalties have a kernel
of their own. Else torch samples, and tests compare both with it: logit bias and watermark, bans, penalties
and masks, temperature, truncation by top-k, top-p, min-p and typical-p, and the draw of a token, in this
order.

A token is drawn by a race. Token t arrives at the time E_t / exp(score_t), where E_t is a random number of
the exponential distribution, and the first one wins: with the probability of its score. Since -log(E_t) is
Gumbel noise, this is the largest sum of score and Gumbel noise. E_t is a pure function of the row's seed and
choice, of the token's index and of its id. Weights are summed as integers, whose sum is the same in every
order. So a token depends on its own row alone, in any batch, and the same seed gives the same tokens in
torch, in C++ and in Triton. Of two equally likely tokens the lower id comes first.

Tokens of prompts are scored chunk by chunk, as prefill computes them. Raw logits are copied to the host for
the rows that return them, as the model computed them.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from ctypes import byref
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from common.messages.request import SamplingParams
from gpu_worker.engine.batch.inputs import offsets_of, to_device
from gpu_worker.engine.batch.row import RowSlice, StepSlices
from gpu_worker.engine.batch.sampling_state import SampleRequest, SamplingState
from gpu_worker.engine.batch.step_result import Float32, Int64
from gpu_worker.engine.cpu import native
from gpu_worker.engine.sampling.grammar import WORD_BITS, mask_of, num_words

MAX_INT32 = 2**31 - 1
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


WORD = 2**32 - 1
RUN = 16
"""Four numbers that Philox gives for one value of its counter are for tokens RUN apart: so vectors of tokens
are neighbours. A counter counts the first RUN of 4 * RUN tokens, then those of the next ones.
"""


def philox(counter: Sequence[torch.Tensor], low: torch.Tensor, high: torch.Tensor) -> list[torch.Tensor]:
    """Philox-4x32 with 10 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): four
    words of the counter, and the two words of the key → four words. All are int64 [...] of 32 bits.
    """
    first, second, third, fourth = counter
    for _ in range(10):
        product, other = 0xD2511F53 * first, 0xCD9E8D57 * third
        first, second = (other >> 32 & WORD) ^ second ^ low, other & WORD
        third, fourth = (product >> 32 & WORD) ^ fourth ^ high, product & WORD
        low, high = low + 0x9E3779B9 & WORD, high + 0xBB67AE85 & WORD
    return [first, second, third, fourth]


def exponentials(words: torch.Tensor) -> torch.Tensor:
    """words int64 [...] of 32 bits → numbers float32 [...] of the exponential distribution, above 0. Computed
    in float64: so rounding hides what logarithms of different libraries differ in.
    """
    return (((words >> 1).double() + 0.5) * 2.0**-31).log().neg().float()


def noise_of(requests: Sequence[SampleRequest], size: int, device: torch.device) -> torch.Tensor:
    """The random numbers of the rows' next tokens, float32 [rows, size]: Philox's, with the seed as its key
    and (place among the tokens, index, choice) as its counter.
    """
    rows = [(one.state.sampling, one.index) for one in requests]
    words = [(own.seed & WORD, own.seed >> 32 & WORD, index, own.choice & WORD) for own, index in rows]
    low, high, index, choice = to_device(words, device, torch.int64).T[..., None]
    groups = -(-size // (4 * RUN))
    counter = torch.arange(groups * RUN, device=device)[None]
    drawn = philox((counter, index, choice, torch.zeros_like(index)), low, high)
    found = torch.stack([one.view(-1, groups, RUN) for one in drawn], 2)
    return exponentials(found.flatten(1)[:, :size])


def draw(scores: torch.Tensor, requests: Sequence[SampleRequest], num_tops: int) -> SamplerOutput:
    """Draw tokens of those that truncation keeps: scores float32 [rows, vocabulary], the likeliest of a row
    at 0. Greedy rows draw the likeliest of all.
    """
    size, device, rows = scores.shape[1], scores.device, []
    for own, top_p in ((request.state.sampling, request.state.top_p) for request in requests):
        drawn = min(own.top_k, MAX_INT32), top_p, own.min_p, own.typical_p, 0
        rows.append(drawn if own.temperature else (0, 1, 0, 1, 1))
    columns = to_device(rows, device, torch.float64).T[..., None]
    likely_by, typical_p, is_greedy = columns[:3], columns[3], columns[4].bool()
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    left_out = torch.ones_like(ordered, dtype=torch.bool)
    left_out.scatter_(1, order, ~is_likely(ordered, *likely_by))
    is_typical = typical_p < 1
    kept = scores.masked_fill(left_out, EXCLUDED)
    kept = kept.masked_fill(is_typical & is_atypical(kept, typical_p), EXCLUDED)
    arrivals = torch.where(is_greedy, -kept, noise_of(requests, size, device) / kept.exp())
    ids = top_k(-arrivals, 1)[1]
    top_ids = top_k(torch.where(is_typical, kept, scores), num_tops)[1]
    total = log_of_weights(to_weights(kept).sum(-1, keepdim=True))
    return SamplerOutput(
        ids[:, 0], (scores.gather(1, ids) - total)[:, 0], top_ids, kept.gather(1, top_ids) - total
    )


def is_likely(
    ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """scores float32 [rows, vocabulary] in falling order, parameters float64 [rows, 1] → bool [rows,
    vocabulary]: the tokens that top-k, top-p and min-p keep; 0, 1 and 0 keep all.

    Top-k keeps the tokens that are as likely as the k-th one. Top-p (arXiv:1904.09751) keeps the fewest that
    have this share of what top-k kept. Min-p (arXiv:2407.01082) keeps the tokens that have this share of the
    likeliest one's probability.
    """
    kth = ordered.gather(1, top_k.long().clamp(1, ordered.shape[1]) - 1)
    in_k = (ordered >= kth) | (top_k == 0)
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
    found = raw_logprobs(logits[rows], output.ids[rows], output.top_ids.shape[1])
    for column, values in zip(output, found, strict=True):
        column.index_copy_(0, rows, values)


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


def adjust_scores(scores: torch.Tensor, requests: Sequence[SampleRequest]) -> None:
    """Change scores float32 [rows, vocabulary] in place. Ids outside the model's vocabulary are ignored.

    The repetition penalty is that of CTRL (arXiv:1909.05858); the frequency and presence penalties are
    subtracted after it. Tokens beyond the end of a mask stay as they are.
    """
    size, device = scores.shape[1], scores.device
    for row, request in zip(scores, requests, strict=True):
        parts = [(ids[ids < size], values[ids < size]) for ids, values in changes(request, size)]
        *added, (where, penalties) = [[to_device(own, device) for own in part] for part in parts]
        for ids, values in added:
            row.index_add_(0, ids, values)
        factor = request.state.sampling.repetition_penalty
        row[where] = torch.where(row[where] < 0, row[where] * factor, row[where] / factor) - penalties
        if (mask := mask_of(request.state, size)) is not None:
            masked = np.unpackbits(mask.view(np.uint8), bitorder="little")[:size] == 0
            row[: len(masked)].masked_fill_(to_device(masked, device), float("-inf"))


CPU = torch.device("cpu")


def kernels(logits: torch.Tensor) -> ctypes.CDLL | None:
    """logits float [rows, vocabulary] → the library, or None if its kernels cannot read them: another dtype
    than float32, bfloat16 and float16, another device, strided rows.
    """
    fits = logits.device.type == "cpu" and logits.dtype in native.TYPE_CODES and logits.stride(1) == 1
    return native.library() if fits else None


def sample_natively(
    library: ctypes.CDLL,
    logits: torch.Tensor,
    requests: Sequence[SampleRequest | None],
    kept: "KeptArguments",
) -> SamplerOutput:
    """logits float [rows, vocabulary] → ids int64 [rows], log-probabilities float32 [rows]. A request of None
    is greedy without penalties.
    """
    num_tops = max((request.state.top_n_tokens for request in filter(None, requests)), default=0)
    output = empty_output(len(requests), num_tops, CPU)
    arguments = kept.of(requests, logits.shape[1], CPU) if any(requests) else []
    columns = (ctypes.c_void_p * len(arguments))(*(column.data_ptr() for column in arguments))
    num_requests = len(arguments[0]) if arguments else 0
    library.tf_sample(*logits_arguments(logits), num_requests, columns, byref(output_pointers(output)))
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


def output_pointers(output: SamplerOutput) -> ctypes.Structure:
    return native.structs["SamplerOutput"](*(column.data_ptr() for column in output), output.top_ids.shape[1])


ALIGNMENT = 16
NO_MASK = np.zeros(0, np.int32)


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float [rows, vocabulary] → ids int64 [rows] of the likeliest tokens, natural logarithms of their
    probabilities float32 [rows].
    """
    if logits.is_cuda:
        from gpu_worker.engine.cuda.kernels.sample import greedy_rows  # Triton: in CUDA builds only

        return greedy_rows(logits)
    best, ids = logits.max(-1)
    # in place: a second buffer of this size would cost page faults
    below = logits.to(torch.float32, copy=True).sub_(best.float()[:, None])
    return ids, below.exp_().sum(-1).log_().neg_()


NUM_PARTS = 4
NO_CHANGES = ((NO_IDS, NO_VALUES),) * NUM_PARTS


SamplingArguments = list[torch.Tensor]
"""What the kernels read of n rows, as kernels/structs.h says."""
TOKEN_INDEX = [field[0] for field in native.structs["SamplingArguments"]._fields_].index("index")
OF_A_STATE = np.dtype(
    [("seed", "<i8"), ("typical_p", "<f8")]
    + [(name, "<f4") for name in ("temperature", "repetition_penalty", "lowest")]
    + [(name, "<i4") for name in ("choice", "top_k", "raw_logprobs", "num_tops")]
)
"""The arguments that a row keeps for all of its tokens."""


class KeptArguments:
    """The arguments of a step stay on the device. They serve the next step, too, while the same rows sample
    in the same places, and nothing changes but the index of their tokens.

    Attributes:
        arguments: None if they change with each token.
        states: of the last step's rows; None is greedy.
        indices: those of the next step.
    """

    def __init__(self) -> None:
        self.arguments: SamplingArguments | None = None
        self.states: list[SamplingState | None] = []
        self.indices: list[int] = []

    def of(
        self, requests: Sequence[SampleRequest | None], vocab_size: int, device: torch.device
    ) -> SamplingArguments:
        """The arguments of a step with these requests."""
        states = [one.state if one else None for one in requests]
        indices = [one.index for one in requests if one]
        arguments = self.arguments
        if arguments and states == self.states and indices == self.indices:
            arguments[TOKEN_INDEX].add_(1)
        else:
            arguments = sampling_arguments(requests, vocab_size, device)
            stay = all(one.state.is_steady(one.index) for one in requests if one)
            self.arguments, self.states = arguments if stay else None, states
        self.indices = [index + 1 for index in indices]
        return arguments


def sample_on_cuda(
    logits: torch.Tensor, requests: Sequence[SampleRequest | None], kept: KeptArguments
) -> SamplerOutput:
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
    arguments = kept.of(requests, logits.shape[1], logits.device)
    scores, totals, num_kept = sample_rows(logits, arguments, output.ids, output.logprobs)
    if num_tops:
        write_tops(output, logits, requests, scores, totals, num_kept)
    return output


def sampling_arguments(
    requests: Sequence[SampleRequest | None], vocab_size: int, device: torch.device
) -> SamplingArguments:
    """Copy to the device, at once, what the kernel needs of the rows that have requests."""
    chosen = [request for request in requests if request]
    states = [request.state for request in chosen]
    parts = [changes(request, vocab_size) for request in chosen]
    masks = [mask_of(state, vocab_size) for state in states]
    words = [NO_MASK if mask is None else mask[: num_words(vocab_size)] for mask in masks]
    # each part begins where the one before it ends, whichever row has that
    ends = np.cumsum([0, *(len(ids) for row in parts for ids, _ in row)])
    places = np.arange(len(chosen))[:, None] * NUM_PARTS + np.arange(1 + NUM_PARTS)
    sizes = np.array([len(own) for own in words])
    of_states = np.frombuffer(bytearray().join(map(parameters_of, states)), OF_A_STATE)
    every = [part for row in parts for part in row if len(part[0])] or [(NO_IDS, NO_VALUES)]
    arrays = (
        *(of_states[name].copy() for name in OF_A_STATE.names or ()),
        np.array([state.top_p for state in states]),
        np.array([place for place, request in enumerate(requests) if request], np.int32),
        np.array([request.index for request in chosen], np.int32),
        ends[places].astype(np.int32),
        np.stack((np.cumsum(sizes) - sizes, sizes * WORD_BITS), 1).astype(np.int32),
        np.minimum(np.concatenate([ids for ids, _ in every]), MAX_INT32).astype(np.int32),
        np.concatenate([values for _, values in every], dtype=np.float32),
        np.concatenate(words, dtype=np.int32),
    )
    return to_device_together(arrays, device)


def parameters_of(state: SamplingState) -> bytes:
    """What a row keeps for all of its tokens, packed as OF_A_STATE."""
    if not state.parameters:
        own = state.sampling
        values = (
            (own.seed + 2**63) % 2**64 - 2**63,
            own.typical_p,
            own.temperature,
            own.repetition_penalty,
            math.log(own.min_p) if own.min_p else -math.inf,
            (own.choice + 2**31) % 2**32 - 2**31,
            min(own.top_k, MAX_INT32),
            own.raw_logprobs,
            state.top_n_tokens,
        )
        state.parameters = np.array(values, OF_A_STATE).tobytes()
    return state.parameters


def changes(request: SampleRequest, vocab_size: int) -> Sequence[tuple[Int64, Float32]]:
    """The row's parts of `ids` int64 [n] and `values` float32 [n], in the order of `SamplingArguments`."""
    state = request.state
    if state.is_steady(request.index):
        return NO_CHANGES
    banned, counts = state.banned_ids_at(request.index), state.token_counts
    return (
        (state.bias_ids, state.bias),
        watermark(state, vocab_size),
        (np.array(banned, np.int64), np.full(len(banned), -math.inf, np.float32)),
        (counts.ids, state.penalty()) if counts else (NO_IDS, NO_VALUES),
    )


def to_device_together(parts: Sequence[npt.NDArray[Any]], device: torch.device) -> SamplingArguments:
    """Arrays [...] of any dtypes → tensors [...] of these dtypes on the device, by one copy.
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
def sample(
    logits: torch.Tensor, requests: Sequence[SampleRequest | None], kept: KeptArguments | None = None
) -> SamplerOutput:
    """logits float [rows, vocabulary] → ids int64 [rows] and their log-probabilities float32 [rows].

    One request for each row; None is greedy without penalties. `kept`: those of the last step.
    """
    library, kept = kernels(logits), kept or KeptArguments()
    if library:
        output = sample_natively(library, logits, requests, kept)
    elif logits.is_cuda and any(requests):
        output = sample_on_cuda(logits, requests, kept)
    else:
        output = sample_by_torch(logits, requests)
    for row, request in enumerate(requests if any(requests) else ()):
        if request and request.state.sampling.report_logits:
            write_logits(output, logits, row, request)
    return output


def write_logits(output: SamplerOutput, logits: torch.Tensor, row: int, request: SampleRequest) -> None:
    """Replace the log-probabilities of one row that reports logits: of logits float [rows, vocabulary] those
    of the model, or processed ones, after penalties and temperature. Tokens that truncation excludes keep
    -inf. An index is a tensor of one dimension: the host would wait to read one of none.
    """
    scores = logits[row : row + 1].to(torch.float32, copy=True)
    if not request.state.sampling.raw_logprobs:
        adjust_scores(scores, [request])
        scores.div_(request.state.sampling.temperature or 1.0)
    tops = output.top_logprobs[row]
    output.logprobs[row : row + 1] = scores[0, output.ids[row : row + 1]]
    output.top_logprobs[row] = torch.where(tops == EXCLUDED, tops, scores[0, output.top_ids[row]])


def sample_by_torch(logits: torch.Tensor, requests: Sequence[SampleRequest | None]) -> SamplerOutput:
    """`sample` by torch: logits float [rows, vocabulary] → ids int64 [rows], log-probabilities float32
    [rows].
    """
    if not any(requests):  # without a copy of the logits
        ids, logprobs = greedy(logits)
        return SamplerOutput(ids, logprobs, ids[:, None][:, :0], logprobs[:, None][:, :0])
    own = [request or GREEDY for request in requests]
    scores = logits.to(torch.float32, copy=True)
    adjust_scores(scores, own)
    scores.sub_(scores.amax(-1, keepdim=True))  # so that no temperature makes a score overflow
    temperatures = [one.state.sampling.temperature or 1.0 for one in own]
    scores.div_(to_device(temperatures, scores.device)[:, None])
    output = draw(scores, own, max(one.state.top_n_tokens for one in own))
    raw = [row for row, request in enumerate(own) if request.state.sampling.raw_logprobs]
    if raw:
        write_raw_logprobs(output, logits, to_device(raw, logits.device))
    return output


GREEDY = SampleRequest(SamplingState(SamplingParams()), 0)
"""Stands for a request of None beside others."""


MAX_LOGITS = 2**25
"""Most logits of prompts in one step: with their float32 copies a few hundred MB."""
MAX_CHUNK_LOGITS = 2**24
"""Logits that torch copies at a time, at most."""


def by_slice(logits: torch.Tensor, slices: StepSlices) -> list[tuple[RowSlice, torch.Tensor]]:
    """logits float [num_logits, vocabulary] of a step → each slice with its own, float [own, vocabulary]"""
    begins = offsets_of(row_slice.num_logits for row_slice in slices).tolist()
    own = [logits[begin:end] for begin, end in pairwise(begins)]
    return list(zip(slices, own, strict=True))


def select_sample_logits(logits: torch.Tensor, slices: StepSlices) -> torch.Tensor:
    """logits float [num_logits, vocabulary] of a step → those to sample from, float [rows, vocabulary]."""
    if not slices.has_prompts or not any(row_slice.num_scored for row_slice in slices):
        return logits
    return torch.cat([own[len(own) - part.num_samples :] for part, own in by_slice(logits, slices)])


def score_prompts(logits: torch.Tensor, slices: StepSlices) -> list[SamplerOutput]:
    """logits float [num_logits, vocabulary] of a step → for each slice that asks for prompt
    log-probabilities: ids int64 [tokens], logprobs float32 [tokens].
    """
    if not slices.has_prompts or not any(row_slice.num_scored for row_slice in slices):
        return []
    return [
        score_prompt(own[: part.num_scored], part)
        for part, own in by_slice(logits, slices)
        if part.num_scored and part.row.prompt_logprobs is not None
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
    if library := kernels(logits):
        return score_natively(library, logits, ids, num_tops)
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


def copy_logits(logits: torch.Tensor, slices: StepSlices) -> list[CopiedLogits]:
    """logits float [num_logits, vocabulary] of a step → copies for the rows that return some. On CUDA they
    are only queued: before the next step, which may overwrite `logits`.
    """
    if not any(row_slice.row.logits for row_slice in slices.others):
        return []
    return [copy_slice(own, part) for part, own in by_slice(logits, slices) if part.returned_logits]


@torch.inference_mode()
def copy_slice(logits: torch.Tensor, row_slice: RowSlice) -> CopiedLogits:
    """logits float [positions, vocabulary], the last ones of the slice → a copy of those that it returns."""
    assert row_slice.row.logits is not None
    dtype, positions = getattr(torch, row_slice.row.logits[2]), row_slice.returned_logits
    place = len(logits) - row_slice.kv_len
    values = logits[place + positions.start : place + positions.stop].to(dtype)
    copied = values.to("cpu", non_blocking=True, copy=True)
    return CopiedLogits(row_slice.row.number, positions.start, copied)
