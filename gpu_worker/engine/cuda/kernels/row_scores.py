"""Functions of Triton kernels that make a row's scores of its logits: masks, biases, bans, penalties,
temperature, truncation.
"""

import triton
import triton.language as tl

from gpu_worker.engine.cuda.kernels.row_lists import keys_of


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
