"""The Triton kernel that samples rows as sampling/sampler.py does by torch, one program for each row:
masks, biases, bans, penalties, temperature, truncation, the race. And the one that finds the likeliest token
of each row: it reads the logits twice, and writes nothing of their size.

It reads a row a few times. Where truncation cuts is found without sorting: tokens that top-k and top-p must
order are narrowed, digit by digit of their keys, to ever shorter lists of ids. A token's key is the bits of
its score without the sign, as in sampling/sampler.py: keys rise as scores fall. Weights are whole numbers and
no product is fused with a sum: so the interpreter samples what a GPU samples.
"""

from typing import Any

import torch
import triton
import triton.language as tl

FINITE = tl.constexpr(0x7F7FFFFF)
"""The largest key of a score that is not excluded."""


@triton.jit  # type: ignore[untyped-decorator]
def exponential(x: tl.tensor) -> tl.tensor:
    """e to the x float32, from -80 to 0: Cephes' expf, as in cpu/kernels/vector.h."""
    shifted = x * 1.44269504088896341 + 12582912.0
    power = shifted - 12582912.0
    r = x - power * 0.693359375 + power * 2.12194440e-4
    y = r * 1.9875691500e-4 + 1.3981999507e-3
    y = y * r + 8.3334519073e-3
    y = y * r + 4.1665795894e-2
    y = y * r + 1.6666665459e-1
    y = y * r + 5.0000001201e-1
    y = y * r * r + r + 1.0
    return y * ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def weights_of(scores: tl.tensor) -> tl.tensor:
    """scores float32, none above 0 → weights int64 in units of 2**-40; NaN has none."""
    weights = exponential(tl.maximum(scores, -28.0)) * 1099511627776.0
    return tl.where(scores > -28.0, weights, 0.0).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def total_of(scores: tl.tensor, best: tl.tensor, size: tl.constexpr, width: tl.constexpr) -> tl.tensor:
    """scores [size], and `best`, the largest → the sum of the weights of `scores - best`, int64."""
    column = tl.arange(0, width)
    sums = tl.full((width,), 0, tl.int64)
    for begin in range(0, size, width):
        place = begin + column
        found = tl.load(scores + place, mask=place < size, other=float("-inf")).to(tl.float32)
        sums += weights_of(found - best)
    return tl.sum(sums, 0)


@triton.jit  # type: ignore[untyped-decorator]
def bound_of_count(scores: tl.tensor, count: tl.tensor, size: tl.constexpr, width: tl.constexpr) -> tl.tensor:
    """scores float32 [size] → a whole number, not far below the score of rank `count`, that at least `count`
    scores reach; the lowest float if it would be below -31.
    """
    column = tl.arange(0, width)
    counts = tl.full((32,), 0, tl.int32)
    for begin in range(0, size, width):
        place = begin + column
        found = tl.load(scores + place, mask=place < size, other=-31.0)
        counts += tl.histogram(tl.minimum(-found, 31.0).to(tl.int32), 32)
    before = tl.sum((tl.cumsum(counts, 0) < count).to(tl.int32), 0)
    return tl.where(before < 31, -(before + 1).to(tl.float32), -3.0e38)


@triton.jit  # type: ignore[untyped-decorator]
def list_from(
    scores: tl.tensor, bound: tl.tensor, listed: tl.tensor, size: tl.constexpr, width: tl.constexpr
) -> tl.tensor:
    """Write the ids of scores float32 [size] that reach the bound to `listed` int32, in order → how many."""
    column = tl.arange(0, width)
    count = 0
    for begin in range(0, size, width):
        place = begin + column
        taken = tl.load(scores + place, mask=place < size, other=float("-inf")) >= bound
        ends = tl.cumsum(taken.to(tl.int32), 0)
        tl.store(listed + count + ends - 1, place, mask=taken)
        count += tl.sum(taken.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit  # type: ignore[untyped-decorator]
def keys_of(scores: tl.tensor, entropy: tl.tensor) -> tl.tensor:
    """scores float32 → keys int32; with an entropy, keys of the distances from it."""
    return tl.abs(scores + entropy).to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def bounds_of(
    scores: tl.tensor, entropy: tl.tensor, listed: tl.tensor, count: tl.tensor, part: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The least and the largest key of listed ids."""
    column = tl.arange(0, part)
    low, high = tl.full((part,), 0x7FFFFFFF, tl.int32), tl.full((part,), 0, tl.int32)
    for begin in range(0, count, part):
        inside = begin + column < count
        token = tl.load(listed + begin + column, mask=inside, other=0)
        key = keys_of(tl.load(scores + token, mask=inside, other=0), entropy)
        low, high = tl.where(inside, tl.minimum(low, key), low), tl.where(inside, tl.maximum(high, key), high)
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit  # type: ignore[untyped-decorator]
def search(
    scores: tl.tensor, entropy: tl.tensor, listed: tl.tensor, count: tl.tensor, narrowed: tl.tensor,
    target: tl.tensor, is_count: tl.tensor, part: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Find the least key such that listed tokens with keys up to it weigh more than the target, which is less
    than their total. If `is_count`, each token weighs 1.

    Returns the key int32, the weight int64 of tokens with smaller keys, how many have this key, and where
    their ids are listed in order: `listed` or `narrowed`, which is overwritten.
    """
    column, digits = tl.arange(0, part), tl.arange(0, 16)
    low, high = bounds_of(scores, entropy, listed, count, part)
    before = target * 0
    while low < high:
        exponent = ((high - low).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        shift = tl.maximum(exponent - 3, 0)
        sums = tl.full((part, 16), 0, tl.int64)
        for begin in range(0, count, part):
            inside = begin + column < count
            token = tl.load(listed + begin + column, mask=inside, other=0)
            found = tl.load(scores + token, mask=inside, other=0)
            digit = (keys_of(found, entropy) - low) >> shift
            weight = tl.where(is_count, 1, weights_of(found))
            sums += tl.where((digit[:, None] == digits[None, :]) & inside[:, None], weight[:, None], 0)
        masses = tl.sum(sums, 0)
        chosen = tl.minimum(tl.sum((before + tl.cumsum(masses, 0) <= target).to(tl.int32), 0), 15)
        before += tl.sum(tl.where(digits < chosen, masses, 0), 0)
        kept = 0
        for begin in range(0, count, part):
            inside = begin + column < count
            token = tl.load(listed + begin + column, mask=inside, other=0)
            digit = (keys_of(tl.load(scores + token, mask=inside, other=0), entropy) - low) >> shift
            taken = inside & (digit == chosen)
            ends = tl.cumsum(taken.to(tl.int32), 0)
            tl.store(narrowed + kept + ends - 1, token, mask=taken)
            kept += tl.sum(taken.to(tl.int32), 0)
        tl.debug_barrier()
        count, listed = kept, narrowed
        low, high = bounds_of(scores, entropy, listed, count, part)
    return low, before, count, listed


@triton.jit  # type: ignore[untyped-decorator]
def weigh_until(
    scores: tl.tensor, key: tl.tensor, listed: tl.tensor, count: tl.tensor, part: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The weight int64 of listed tokens with keys up to `key`, and how many they are."""
    column = tl.arange(0, part)
    sums, counts = tl.full((part,), 0, tl.int64), tl.full((part,), 0, tl.int32)
    for begin in range(0, count, part):
        inside = begin + column < count
        token = tl.load(listed + begin + column, mask=inside, other=0)
        found = tl.load(scores + token, mask=inside, other=float("-inf"))
        taken = inside & (keys_of(found, 0.0) <= key)
        sums += tl.where(taken, weights_of(found), 0)
        counts += taken.to(tl.int32)
    return tl.sum(sums, 0), tl.sum(counts, 0)


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
def change(
    scores: tl.tensor, ids: tl.tensor, values: tl.tensor, begin: tl.tensor, end: tl.tensor,
    repetition: tl.tensor, sign: tl.tensor, size: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    """Apply the repetition penalty, then add values float32 times their sign, at ids int32 from `begin` to
    `end`, which differ.
    """
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
        tl.store(scores + token, found + sign * value, mask=known)
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
def high_product(x: tl.tensor, factor: tl.constexpr) -> tl.tensor:
    """x uint32 → the upper word of its product with a word."""
    return ((x.to(tl.uint64) * factor) >> 32).to(tl.uint32)


@triton.jit  # type: ignore[untyped-decorator]
def philox(
    counter: tl.tensor, index: tl.tensor, choice: tl.tensor, seed: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Philox-4x32 with 10 rounds: four words uint32 for each counter, as sampling/sampler.py draws them."""
    first, zero = counter.to(tl.uint32), counter.to(tl.uint32) * 0
    second, third, fourth = zero + index.to(tl.uint32), zero + choice.to(tl.uint32), zero
    low, high = zero + seed.to(tl.uint32), zero + (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        product, other = high_product(first, 0xD2511F53), high_product(third, 0xCD9E8D57)
        low_product, low_other = first * 0xD2511F53, third * 0xCD9E8D57
        first, second = other ^ second ^ low, low_other
        third, fourth = product ^ fourth ^ high, low_product
        low, high = low + 0x9E3779B9, high + 0xBB67AE85
    return first, second, third, fourth


@triton.jit  # type: ignore[untyped-decorator]
def kept_weights(
    scores: tl.tensor, place: tl.tensor, border: tl.tensor, last: tl.tensor, size: tl.constexpr
) -> tl.tensor:
    """What tokens weigh, float32: those with a key up to the border, of those with its key up to id `last`;
    the others weigh nothing.
    """
    found = tl.load(scores + place, mask=place < size, other=float("-inf"))
    key = keys_of(found, 0.0)
    kept = ((key < border) | ((key == border) & (place <= last))) & (found > -80.0)
    return tl.where(kept, exponential(tl.maximum(found, -80.0)), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def below_exponentials(words: tl.tensor) -> tl.tensor:
    """words uint32 → float32 a little below the numbers of `arrivals`: they take no logarithm."""
    return (0x7FFFFFFF - (words >> 1).to(tl.int32)).to(tl.float32) * 0.9999 * 4.656612873077393e-10


@triton.jit  # type: ignore[untyped-decorator]
def arrivals(words: tl.tensor, weights: tl.tensor) -> tl.tensor:
    """words uint32, weights float32 → when tokens arrive, float32: numbers of the exponential distribution,
    divided by the weights.
    """
    numbers = -tl.log(((words >> 1).to(tl.float64) + 0.5) * 4.656612873077393e-10)
    times = tl.div_rn(numbers.to(tl.float32), tl.where(weights > 0, weights, 1.0))
    return tl.where(weights > 0, times, float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def sooner(
    time: tl.tensor, place: tl.tensor, least: tl.tensor, first: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Of times float32 at some places, and the least so far and its place: the least and its first place."""
    most = tl.min(time, 0)
    at = tl.min(tl.where(time == most, place, 0x7FFFFFFF), 0)
    is_sooner = (most < least) | ((most == least) & (at < first))
    return tl.where(is_sooner, most, least), tl.where(is_sooner, at, first)


@triton.jit  # type: ignore[untyped-decorator]
def winner(
    scores: tl.tensor, border: tl.tensor, last: tl.tensor, seed: tl.tensor, choice: tl.tensor,
    index: tl.tensor, size: tl.constexpr, width: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """scores float32 [size] → the kept token that arrives first. Parts of the row in which no kept token can
    be the first take no logarithms, and those without kept tokens no random numbers.
    """
    column = tl.arange(0, width // 4)
    least, first = tl.full((), float("inf"), tl.float32), tl.full((), size, tl.int32)
    for begin in range(0, size, width):
        counter = begin // 4 + column
        place = counter // 16 * 64 + counter % 16
        w0, w1 = (
            kept_weights(scores, place, border, last, size),
            kept_weights(scores, place + 16, border, last, size),
        )
        w2, w3 = (
            kept_weights(scores, place + 32, border, last, size),
            kept_weights(scores, place + 48, border, last, size),
        )
        if tl.max(tl.maximum(tl.maximum(w0, w1), tl.maximum(w2, w3)), 0) > 0:
            n0, n1, n2, n3 = philox(counter, index, choice, seed)
            early = (below_exponentials(n0) < w0 * least) | (below_exponentials(n1) < w1 * least)
            early |= (below_exponentials(n2) < w2 * least) | (below_exponentials(n3) < w3 * least)
            if tl.max(early.to(tl.int32), 0) > 0:
                least, first = sooner(arrivals(n0, w0), place, least, first)
                least, first = sooner(arrivals(n1, w1), place + 16, least, first)
                least, first = sooner(arrivals(n2, w2), place + 32, least, first)
                least, first = sooner(arrivals(n3, w3), place + 48, least, first)
    return tl.minimum(first, size - 1)


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
def adjust(
    scores: tl.tensor, parts: tl.tensor, ids: tl.tensor, values: tl.tensor, repetition: tl.tensor,
    size: tl.constexpr, part: tl.constexpr,
) -> None:  # fmt: skip
    """Change scores float32 [size] by logit bias, watermark, bans and penalties."""
    begin = tl.load(parts)
    for number in range(1, 4):
        end = tl.load(parts + number)
        change(scores, ids, values, begin, end, 1.0, 1.0, size, part)
        begin = end
    change(scores, ids, values, begin, tl.load(parts + 4), repetition, -1.0, size, part)


@triton.jit  # type: ignore[untyped-decorator]
def truncate(
    scores: tl.tensor, total: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, lowest: tl.tensor,
    listed: tl.tensor, narrowed: tl.tensor, size: tl.constexpr, width: tl.constexpr, part: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Find what top-k, top-p and min-p keep of scores float32 [size], whose weights are `total` → the largest
    key, the last id that is kept of those with this key, and the kept tokens' weight and number.
    """
    if top_k > 0:
        bound = bound_of_count(scores, tl.minimum(top_k, size), size, width)
    else:
        # all tokens with a smaller share have together less than what top-p leaves out
        share = ((1 - top_p) * (total.to(tl.float64) / size) / 1099511627776.0).to(tl.float32)
        bound = tl.where(share > 1e-30, tl.log(tl.maximum(share, 1e-30)) - 0.01, -3.0e38)
        bound = tl.maximum(bound, lowest)
    count = list_from(scores, bound, listed, size, width)
    border, last, left = tl.abs(lowest).to(tl.int32, bitcast=True), tl.full((), size, tl.int32), total
    border = tl.minimum(border, FINITE)
    if top_k > 0:
        rank = tl.minimum(top_k, count) - 1
        kth, _, _, _ = search(scores, 0.0, listed, count, narrowed, rank, True, part)
        border = tl.minimum(border, kth)
        left, _ = weigh_until(scores, kth, listed, count, part)
    total, kept = weigh_until(scores, border, listed, count, part)
    wanted = tl.maximum(tl.ceil(top_p * left.to(tl.float64)).to(tl.int64), 1)
    if (top_p < 1) & (wanted <= total):
        border, last, ties, total = shortest_prefix(scores, listed, count, narrowed, wanted, part)
        _, before = weigh_until(scores, border - 1, listed, count, part)
        kept = before + ties.to(tl.int32)
    return border, last, total, kept


@triton.jit  # type: ignore[untyped-decorator]
def exclude_atypical(
    scores: tl.tensor, typical_p: tl.tensor, listed: tl.tensor, narrowed: tl.tensor, size: tl.constexpr,
    width: tl.constexpr, part: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Set scores float32 [size] to -inf that typical-p leaves out → the weight of the others."""
    total = total_of(scores, 0.0, size, width)
    entropy = entropy_of(scores, total, size, width)
    count = list_from(scores, -3.0e38, listed, size, width)
    rank = tl.maximum(tl.ceil(typical_p * total.to(tl.float64)).to(tl.int64), 1) - 1
    key, _, _, _ = search(scores, entropy, listed, count, narrowed, rank, False, part)
    exclude(scores, entropy, key, size, size, width)
    return total_of(scores, 0.0, size, width)


@triton.jit  # type: ignore[untyped-decorator]
def sample_row(
    logits: tl.tensor, stride: tl.tensor, seeds: tl.tensor, typical_ps: tl.tensor, temperatures: tl.tensor,
    repetitions: tl.tensor, lowests: tl.tensor, choices: tl.tensor, top_ks: tl.tensor,
    raw_logprobs: tl.tensor, num_tops: tl.tensor, top_ps: tl.tensor, places: tl.tensor, indices: tl.tensor,
    parts: tl.tensor, mask_spans: tl.tensor, ids: tl.tensor, values: tl.tensor, masks: tl.tensor,
    all_scores: tl.tensor, lists: tl.tensor, output_ids: tl.tensor, output_logprobs: tl.tensor,
    totals: tl.tensor, kept_counts: tl.tensor, size: tl.constexpr, width: tl.constexpr, part: tl.constexpr,
) -> None:  # fmt: skip
    """One program for a row; what it reads of it are the `SamplingArguments` of kernels/structs.h."""
    row = tl.program_id(0).to(tl.int64)
    place, mask = tl.load(places + row).to(tl.int64), tl.load(mask_spans + 2 * row)
    line, scores = logits + place * stride, all_scores + row * size
    listed, narrowed = lists + 2 * row * size, lists + (2 * row + 1) * size
    temperature, typical_p = tl.load(temperatures + row), tl.load(typical_ps + row)
    top_k, top_p = tl.load(top_ks + row).to(tl.int64), tl.load(top_ps + row)
    lowest = tl.load(lowests + row)
    read_row(line, scores, masks + mask, tl.load(mask_spans + 2 * row + 1), size, width)
    adjust(scores, parts + 5 * row, ids, values, tl.load(repetitions + row), size, part)
    best = largest(scores, size, width)
    token, logprob = tl.full((), 0, tl.int32), tl.full((), float("nan"), tl.float32)
    total, kept = tl.full((), 1, tl.int64), tl.full((), size, tl.int32)
    if (best > float("-inf")) & (best < float("inf")):
        scale(scores, best, tl.where(temperature == 0, 1.0, temperature), size, width)
        total = total_of(scores, 0.0, size, width)
        border, last = tl.full((), FINITE, tl.int32), tl.full((), size, tl.int32)
        if temperature == 0:
            token = first_likeliest(scores, size, width)
        else:
            if (top_k > 0) | (top_p < 1) | (lowest > float("-inf")):
                border, last, total, kept = truncate(
                    scores, total, top_k, top_p, lowest, listed, narrowed, size, width, part
                )
            if typical_p < 1:
                exclude(scores, 0.0, border, last, size, width)
                total = exclude_atypical(scores, typical_p, listed, narrowed, size, width, part)
                kept = tl.full((), size, tl.int32)
            seed, choice, index = tl.load(seeds + row), tl.load(choices + row), tl.load(indices + row)
            token = winner(scores, border, last, seed, choice, index, size, width)
        logprob = tl.load(scores + token) - logarithm(total)
        if tl.load(raw_logprobs + row) > 0:
            best = largest(line, size, width)
            chosen = tl.load(line + token).to(tl.float32)
            logprob = chosen - best - logarithm(total_of(line, best, size, width))
    tl.store(output_ids + place, token.to(tl.int64))
    tl.store(output_logprobs + place, logprob)
    tl.store(totals + row, total)
    tl.store(kept_counts + row, kept)


def sample_rows(
    logits: torch.Tensor, arguments: Any, output_ids: torch.Tensor, output_logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample rows of logits float [rows, vocabulary], whose numbers lie next to each other, in one launch.

    `arguments` are the `SamplingArguments` of n rows. Writes ids int64 [rows] and log-probabilities float32
    [rows] of these. Returns scores float32 [n, vocabulary], totals int64 [n] of the kept tokens' weights, and
    how many are kept, int32 [n].
    """
    num_rows, size = len(arguments[0]), logits.shape[1]
    scores = torch.empty(num_rows, size, dtype=torch.float32, device=logits.device)
    lists = torch.empty(num_rows, 2, size, dtype=torch.int32, device=logits.device)
    totals = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    kept = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    sample_row[(num_rows,)](
        logits, logits.stride(0), *arguments, scores, lists, output_ids, output_logprobs, totals, kept, size,
        WIDTH, PART, **OPTIONS,
    )  # fmt: skip
    return scores, totals, kept


GREEDY_WIDTH = 8192
"""Logits that a program reads at once. One program computes a whole row, so that its sum has the same order
whatever the other rows are.
"""
GREEDY_OPTIONS = {"num_warps": 16}


@triton.jit  # type: ignore[untyped-decorator]
def greedy_row(
    logits: tl.tensor, ids: tl.tensor, logprobs: tl.tensor, size: tl.constexpr, width: tl.constexpr
) -> None:  # fmt: skip
    """One program for a row. Of equal logits the first is taken."""
    row = tl.program_id(0).to(tl.int64)
    column, none = tl.arange(0, width), float("-inf")
    best, place = tl.full((width,), none, tl.float32), tl.full((width,), 0, tl.int32)
    for begin in range(0, size, width):
        found = tl.load(logits + row * size + begin + column, mask=begin + column < size, other=none).to(
            tl.float32
        )
        place = tl.where(found > best, begin + column, place)
        best = tl.maximum(best, found)
    most = tl.max(best, 0)
    total = tl.full((width,), 0.0, tl.float32)
    for begin in range(0, size, width):
        found = tl.load(logits + row * size + begin + column, mask=begin + column < size, other=none).to(
            tl.float32
        )
        total += tl.exp(found - most)
    tl.store(ids + row, tl.min(tl.where(best == most, place, size), 0).to(tl.int64))
    tl.store(logprobs + row, -tl.log(tl.sum(total, 0)))


def greedy_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest token of each row. logits [rows, vocabulary] of any float dtype → ids int64 [rows],
    log-probabilities float32 [rows]
    """
    rows, size = logits.shape
    logits = logits.contiguous()
    ids, logprobs = (
        torch.empty(rows, dtype=dtype, device=logits.device) for dtype in (torch.int64, torch.float32)
    )
    greedy_row[(rows,)](logits, ids, logprobs, size, GREEDY_WIDTH, **GREEDY_OPTIONS)
    return ids, logprobs
