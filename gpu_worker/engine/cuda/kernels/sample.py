"""The Triton kernel that samples rows as sampling/sampler.py does by torch, one program for each row:
masks, biases, bans, penalties, temperature, truncation, the draw.

It reads a row a few times; tokens that top-k, top-p and the draw must order are narrowed to ever shorter
lists of ids. Weights are whole numbers and no product is fused with a sum: so the interpreter samples what a
GPU samples.
"""

import torch
import triton
import triton.language as tl

from gpu_worker.engine.cuda.kernels.row_lists import (
    bound_of_count,
    exponential,
    keys_of,
    list_from,
    search,
    total_of,
    weigh_until,
    weights_of,
)


@triton.jit  # type: ignore[untyped-decorator]
def read_row(
    logits: tl.tensor, scores: tl.tensor, masks: tl.tensor, mask_end: tl.tensor,
    size: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    """Copy logits [size] to scores float32 [size]; NaN and masked tokens become -inf."""
    column = tl.arange(0, width)
    for begin in range(0, size, width):
        place = begin + column
        found = tl.load(logits + place, mask=place < size, other=0).to(tl.float32)
        words = tl.load(masks + place // 32, mask=place < mask_end, other=-1)
        allowed = (found == found) & ((words >> (place % 32) & 1) == 1)
        tl.store(scores + place, tl.where(allowed, found, float("-inf")), mask=place < size)
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def add_bias(
    scores: tl.tensor, ids: tl.tensor, values: tl.tensor, begin: tl.tensor, end: tl.tensor,
    size: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    """Add values float32 to the scores of ids int32, both from `begin` to `end`; ids differ."""
    column = tl.arange(0, width)
    for first in range(begin, end, width):
        place = first + column
        token = tl.load(ids + place, mask=place < end, other=size)
        value = tl.load(values + place, mask=place < end, other=0)
        known = token < size
        tl.store(scores + token, tl.load(scores + token, mask=known) + value, mask=known)
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def penalize(
    scores: tl.tensor, ids: tl.tensor, values: tl.tensor, begin: tl.tensor, end: tl.tensor,
    repetition: tl.tensor, size: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    """Apply the repetition penalty, then subtract values float32, at ids int32 from `begin` to `end`."""
    column = tl.arange(0, width)
    for first in range(begin, end, width):
        place = first + column
        token = tl.load(ids + place, mask=place < end, other=size)
        value = tl.load(values + place, mask=place < end, other=0)
        known = token < size
        found = tl.load(scores + token, mask=known, other=0)
        found = tl.where(
            found < 0, found * repetition, tl.div_rn(found, tl.full((width,), 0.0, tl.float32) + repetition)
        )
        tl.store(scores + token, found - value, mask=known)
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def largest(numbers: tl.tensor, size: tl.constexpr, width: tl.constexpr) -> tl.tensor:
    """numbers [size] → the largest, float32, NaN left out."""
    column = tl.arange(0, width)
    best = tl.full((width,), float("-inf"), tl.float32)
    for begin in range(0, size, width):
        place = begin + column
        found = tl.load(numbers + place, mask=place < size, other=float("-inf")).to(tl.float32)
        best = tl.where(found > best, found, best)
    return tl.max(best, 0)


@triton.jit  # type: ignore[untyped-decorator]
def scale(
    scores: tl.tensor, best: tl.tensor, temperature: tl.tensor, size: tl.constexpr, width: tl.constexpr
) -> None:
    """Subtract the largest from scores float32 [size], then divide them by the temperature."""
    column = tl.arange(0, width)
    divisor = tl.full((width,), 0, tl.float32) + temperature
    for begin in range(0, size, width):
        place = begin + column
        found = tl.load(scores + place, mask=place < size, other=0)
        tl.store(scores + place, tl.div_rn(found - best, divisor), mask=place < size)
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def exclude(
    scores: tl.tensor, entropy: tl.tensor, key: tl.tensor, last: tl.tensor, size: tl.constexpr,
    width: tl.constexpr,
) -> None:  # fmt: skip
    """Set scores float32 [size] to -inf where the key is larger than `key`, or equal and the id above
    `last`.
    """
    column = tl.arange(0, width)
    for begin in range(0, size, width):
        place = begin + column
        found = tl.load(scores + place, mask=place < size, other=0)
        own = keys_of(found, entropy)
        kept = (own < key) | ((own == key) & (place <= last))
        tl.store(scores + place, float("-inf"), mask=(place < size) & ~kept)
    tl.debug_barrier()


WIDTH = 4096
"""Logits that a program reads at once."""
PART = 1024
"""Tokens of a list that a program reads at once, each for all digits."""
OPTIONS = {"num_warps": 16, "num_stages": 1, "enable_fp_fusion": False}


@triton.jit  # type: ignore[untyped-decorator]
def first_beyond(scores: tl.tensor, target: tl.tensor, size: tl.constexpr, width: tl.constexpr) -> tl.tensor:
    """scores float32 [size] → the first id such that tokens up to it weigh more than the target."""
    column = tl.arange(0, width)
    before, chosen = target * 0, tl.full((), size, tl.int32)
    for begin in range(0, size, width):
        place = begin + column
        weights = weights_of(tl.load(scores + place, mask=place < size, other=float("-inf")))
        weight = tl.sum(weights, 0)
        if (before <= target) & (before + weight > target):
            beyond = tl.cumsum(weights, 0) + before > target
            chosen = tl.min(tl.where(beyond, place, size), 0)
        before += weight
    return tl.minimum(chosen, size - 1)


@triton.jit  # type: ignore[untyped-decorator]
def entropy_of(scores: tl.tensor, total: tl.tensor, size: tl.constexpr, width: tl.constexpr) -> tl.tensor:
    """scores float32 [size] → their entropy without the logarithm of the total, which scores lack, too."""
    column = tl.arange(0, width)
    sums = tl.full((width,), 0, tl.int64)
    for begin in range(0, size, width):
        place = begin + column
        found = tl.load(scores + place, mask=place < size, other=float("-inf"))
        bounded = tl.maximum(found, -80.0)
        share = exponential(bounded) * -bounded * 1099511627776.0
        sums += tl.where(found > -80.0, share, 0.0).to(tl.int64)
    return tl.div_rn(tl.sum(sums, 0).to(tl.float32), total.to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def logarithm(total: tl.tensor) -> tl.tensor:
    """A sum of weights → its natural logarithm float32."""
    return tl.log(total.to(tl.float64) / 1099511627776.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def first_likeliest(scores: tl.tensor, size: tl.constexpr, width: tl.constexpr) -> tl.tensor:
    """scores float32 [size] → the first id whose score is 0."""
    column = tl.arange(0, width)
    first = tl.full((width,), size, tl.int32)
    for begin in range(0, size, width):
        place = begin + column
        found = tl.load(scores + place, mask=place < size, other=float("-inf"))
        first = tl.where(found == 0, tl.minimum(first, place), first)
    return tl.min(first, 0)


@triton.jit  # type: ignore[untyped-decorator]
def shortest_prefix(
    scores: tl.tensor, listed: tl.tensor, count: tl.tensor, narrowed: tl.tensor, weight: tl.tensor,
    part: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Find the fewest of the likeliest listed tokens that weigh at least `weight` → key and id of the last,
    how many of them have its key, and their weight.
    """
    key, before, _, ties_at = search(scores, 0.0, listed, count, narrowed, weight - 1, False, part)
    own = tl.maximum(weights_of(-key.to(tl.float32, bitcast=True)), 1)
    ties = (weight - before + own - 1) // own
    return key, tl.load(ties_at + ties - 1), ties, before + ties * own


@triton.jit  # type: ignore[untyped-decorator]
def target_of(uniform: tl.tensor, total: tl.tensor) -> tl.tensor:
    """A number float64 in [0, 1), a sum of weights int64 → the least weight before the chosen token."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit  # type: ignore[untyped-decorator]
def sample_row(
    logits: tl.tensor, stride: tl.tensor, parameters: tl.tensor, ids: tl.tensor, values: tl.tensor,
    masks: tl.tensor, all_scores: tl.tensor, lists: tl.tensor, output_ids: tl.tensor,
    output_logprobs: tl.tensor, totals: tl.tensor, kept_counts: tl.tensor,
    size: tl.constexpr, width: tl.constexpr, part: tl.constexpr,
) -> None:  # fmt: skip
    """One program for a row. `parameters` are those of `RowParameters`, by their places there."""
    row = tl.program_id(0).to(tl.int64)
    own = parameters + row * 16
    place = tl.load(own).to(tl.int64)
    line, scores = logits + place * stride, all_scores + row * size
    listed, narrowed = lists + 2 * row * size, lists + (2 * row + 1) * size
    temperature, repetition = tl.load(own + 1).to(tl.float32), tl.load(own + 2).to(tl.float32)
    top_k, top_p = tl.load(own + 3).to(tl.int64), tl.load(own + 4)
    lowest, typical_p, uniform = tl.load(own + 5).to(tl.float32), tl.load(own + 6), tl.load(own + 7)
    read_row(
        line, scores, masks + tl.load(own + 14).to(tl.int64), tl.load(own + 15).to(tl.int32), size, width
    )
    for span in range(3):
        begin, end = tl.load(own + 9 + span).to(tl.int32), tl.load(own + 10 + span).to(tl.int32)
        add_bias(scores, ids, values, begin, end, size, part)
    begin, end = tl.load(own + 12).to(tl.int32), tl.load(own + 13).to(tl.int32)
    penalize(scores, ids, values, begin, end, repetition, size, part)
    best = largest(scores, size, width)
    token, logprob = tl.full((), 0, tl.int32), tl.full((), float("nan"), tl.float32)
    total, kept = tl.full((), 1, tl.int64), tl.full((), size, tl.int32)
    if (best > float("-inf")) & (best < float("inf")):
        scale(scores, best, tl.where(temperature == 0, 1.0, temperature), size, width)
        total = total_of(scores, 0.0, size, width)
        truncates = (top_k > 0) | (top_p < 1) | (lowest > float("-inf"))
        if temperature == 0:
            token = first_likeliest(scores, size, width)
        else:
            if truncates:
                if top_k > 0:
                    bound = bound_of_count(scores, tl.minimum(top_k, size), size, width)
                else:
                    # all tokens with a smaller share have together less than what top-p leaves out
                    share = ((1 - top_p) * (total.to(tl.float64) / size) / 1099511627776.0).to(tl.float32)
                    bound = tl.where(share > 1e-30, tl.log(tl.maximum(share, 1e-30)) - 0.01, -3.0e38)
                    bound = tl.maximum(bound, lowest)
                count = list_from(scores, bound, listed, size, width)
                border, left = tl.abs(lowest).to(tl.int32, bitcast=True), total
                if top_k > 0:
                    rank = tl.minimum(top_k, count) - 1
                    kth, _, _, _ = search(scores, 0.0, listed, count, narrowed, rank, True, part)
                    border = tl.minimum(border, kth)
                    left, _ = weigh_until(scores, kth, listed, count, part)
                total, kept = weigh_until(scores, border, listed, count, part)
                wanted = tl.maximum(tl.ceil(top_p * left.to(tl.float64)).to(tl.int64), 1)
                last = tl.full((), size, tl.int32)
                if (top_p < 1) & (wanted <= total):
                    border, last, ties, total = shortest_prefix(scores, listed, count, narrowed, wanted, part)
                    _, before = weigh_until(scores, border - 1, listed, count, part)
                    kept = before + ties.to(tl.int32)
                if typical_p < 1:
                    exclude(scores, 0.0, border, last, size, width)
                    total = total_of(scores, 0.0, size, width)
                else:
                    wanted = target_of(uniform, total) + 1
                    _, token, _, _ = shortest_prefix(scores, listed, count, narrowed, wanted, part)
            if typical_p < 1:
                entropy = entropy_of(scores, total, size, width)
                count = list_from(scores, -3.0e38, listed, size, width)
                rank = tl.maximum(tl.ceil(typical_p * total.to(tl.float64)).to(tl.int64), 1) - 1
                key, _, _, _ = search(scores, entropy, listed, count, narrowed, rank, False, part)
                exclude(scores, entropy, key, size, size, width)
                total, kept = total_of(scores, 0.0, size, width), tl.full((), size, tl.int32)
            if (typical_p < 1) | (truncates == 0):
                token = first_beyond(scores, target_of(uniform, total), size, width)
        logprob = tl.load(scores + token) - logarithm(total)
        if tl.load(own + 8) > 0:
            best = largest(line, size, width)
            chosen = tl.load(line + token).to(tl.float32)
            logprob = chosen - best - logarithm(total_of(line, best, size, width))
    tl.store(output_ids + place, token.to(tl.int64))
    tl.store(output_logprobs + place, logprob)
    tl.store(totals + row, total)
    tl.store(kept_counts + row, kept)


def sample_rows(
    logits: torch.Tensor,
    parameters: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    masks: torch.Tensor,
    output_ids: torch.Tensor,
    output_logprobs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample rows of logits float [rows, vocabulary], whose numbers lie next to each other, in one launch.

    parameters float64 [n, 16], ids int32, values float32 and masks int32 as `SamplingArguments` has them.
    Writes ids int64 [rows] and log-probabilities float32 [rows] of the n rows. Returns scores float32 [n,
    vocabulary], totals int64 [n] of the kept tokens' weights, and how many are kept, int32 [n].
    """
    num_rows, size = len(parameters), logits.shape[1]
    scores = torch.empty(num_rows, size, dtype=torch.float32, device=logits.device)
    lists = torch.empty(num_rows, 2, size, dtype=torch.int32, device=logits.device)
    totals = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    kept = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    sample_row[(num_rows,)](
        logits, logits.stride(0), parameters, ids, values, masks, scores, lists, output_ids, output_logprobs,
        totals, kept, size, WIDTH, PART, **OPTIONS,
    )  # fmt: skip
    return scores, totals, kept
