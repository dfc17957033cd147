"""Functions of Triton kernels that find where truncation cuts a row, without sorting it: weights of scores,
and lists of ids that are narrowed digit by digit.

A token's key is the bits of its score without the sign, as in sampling/sampler.py: keys rise as scores
fall.
"""

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
