"""The Triton kernel that finds the likeliest token of each row. It reads the logits twice, and writes nothing
of their size.
"""

import torch
import triton
import triton.language as tl

WIDTH = 8192
"""Logits that a program reads at once. One program computes a whole row, so that its sum has the same order
whatever the other rows are.
"""
OPTIONS = {"num_warps": 16}


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
    greedy_row[(rows,)](logits, ids, logprobs, size, WIDTH, **OPTIONS)
    return ids, logprobs
