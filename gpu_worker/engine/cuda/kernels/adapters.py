"""The Triton kernels of LoRA adapters: rows of one adapter are multiplied together. The grid covers as many
tiles as there could be; a program whose tile has no rows ends at once. So one grid serves every step of its
size, as captured steps need.
"""

import torch
import triton
import triton.language as tl

TILE_ROWS, TILE_INPUTS, TILE_OUTPUTS = 16, 128, 64
"""A matrix unit multiplies no fewer rows."""


@triton.jit  # type: ignore[untyped-decorator]
def shrink_tile(
    rows: tl.tensor, down: tl.tensor, shrunk: tl.tensor, ranks: tl.tensor, order: tl.tensor,
    starts: tl.tensor, row_stride: tl.tensor, inputs: tl.tensor,
    max_rank: tl.constexpr, tile_rows: tl.constexpr, tile_ranks: tl.constexpr, tile_inputs: tl.constexpr,
) -> None:  # fmt: skip
    """One program for a tile of the rows of a slot, and a tile of its ranks."""
    slot = tl.program_id(2)
    begin = tl.load(starts + slot) + tl.program_id(0) * tile_rows
    end = tl.load(starts + slot + 1)
    rank = tl.load(ranks + slot)
    if (begin < end) & (tl.program_id(1) * tile_ranks < rank):
        place = begin + tl.arange(0, tile_rows)
        there = place < end
        row = tl.load(order + place, mask=there, other=0).to(tl.int64)
        own = tl.program_id(1) * tile_ranks + tl.arange(0, tile_ranks)
        total = tl.full((tile_rows, tile_ranks), 0.0, tl.float32)
        first = down + slot.to(tl.int64) * max_rank * inputs
        for begin_input in range(0, inputs, tile_inputs):
            column = begin_input + tl.arange(0, tile_inputs)
            inside = column < inputs
            factors = tl.load(
                rows + row[:, None] * row_stride + column[None, :],
                mask=there[:, None] & inside[None, :], other=0,
            )  # fmt: skip
            weights = tl.load(
                first + own[None, :].to(tl.int64) * inputs + column[:, None],
                mask=(own < rank)[None, :] & inside[:, None], other=0,
            )  # fmt: skip
            total = tl.dot(factors, weights, total, input_precision="ieee")
        target = shrunk + row[:, None] * max_rank + own[None, :]
        tl.store(target, total, mask=there[:, None] & (own < max_rank)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def expand_tile(
    output: tl.tensor, shrunk: tl.tensor, up: tl.tensor, ranks: tl.tensor, order: tl.tensor,
    starts: tl.tensor, output_stride: tl.tensor, outputs: tl.tensor,
    max_rank: tl.constexpr, tile_rows: tl.constexpr, tile_ranks: tl.constexpr, tile_outputs: tl.constexpr,
) -> None:  # fmt: skip
    """One program for a tile of the rows of a slot, and a tile of outputs."""
    slot = tl.program_id(2)
    begin = tl.load(starts + slot) + tl.program_id(0) * tile_rows
    end = tl.load(starts + slot + 1)
    rank = tl.load(ranks + slot)
    if (begin < end) & (rank > 0):
        dtype: tl.constexpr = up.dtype.element_ty
        place = begin + tl.arange(0, tile_rows)
        there = place < end
        row = tl.load(order + place, mask=there, other=0).to(tl.int64)
        column = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
        inside = column < outputs
        total = tl.full((tile_rows, tile_outputs), 0.0, tl.float32)
        first = up + slot.to(tl.int64) * outputs * max_rank
        for begin_rank in range(0, rank, tile_ranks):
            own = begin_rank + tl.arange(0, tile_ranks)
            factors = tl.load(
                shrunk + row[:, None] * max_rank + own[None, :],
                mask=there[:, None] & (own < rank)[None, :], other=0,
            )  # fmt: skip
            weights = tl.load(
                first + column[None, :].to(tl.int64) * max_rank + own[:, None],
                mask=(own < rank)[:, None] & inside[None, :], other=0,
            )  # fmt: skip
            total = tl.dot(factors.to(dtype), weights, total, input_precision="ieee")
        target = output + row[:, None] * output_stride + column[None, :]
        mask = there[:, None] & inside[None, :]
        total += tl.load(target, mask=mask, other=0).to(tl.float32)
        tl.store(target, total.to(output.dtype.element_ty), mask=mask)


def shrink(
    rows: torch.Tensor, down: torch.Tensor, ranks: torch.Tensor, order: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """rows [tokens, inputs] and down [slots, rank, inputs] of the model's dtype; ranks int32 [slots], order
    int32 [tokens], starts int32 [slots + 1] → float32 [tokens, rank], of tokens that have an adapter
    """
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    slots, max_rank, inputs = down.shape
    shrunk = rows.new_empty(len(rows), max_rank, dtype=torch.float32)
    tile_ranks = max(16, min(64, triton.next_power_of_2(max_rank)))
    grid = triton.cdiv(len(rows), TILE_ROWS), triton.cdiv(max_rank, tile_ranks), slots
    shrink_tile[grid](
        rows, down, shrunk, ranks, order, starts, rows.stride(0), inputs,
        max_rank, TILE_ROWS, tile_ranks, TILE_INPUTS,
    )  # fmt: skip
    return shrunk


def expand(
    output: torch.Tensor,
    shrunk: torch.Tensor,
    up: torch.Tensor,
    ranks: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    """Add to `output` [tokens, outputs] of the model's dtype, whose rows may lie apart: shrunk float32
    [tokens, rank], up [slots, outputs, rank] of the model's dtype; the rest as in `shrink`.
    """
    slots, outputs, max_rank = up.shape
    tile_ranks = max(16, min(64, triton.next_power_of_2(max_rank)))
    grid = triton.cdiv(len(output), TILE_ROWS), triton.cdiv(outputs, TILE_OUTPUTS), slots
    expand_tile[grid](
        output, shrunk, up, ranks, order, starts, output.stride(0), outputs,
        max_rank, TILE_ROWS, tile_ranks, TILE_OUTPUTS,
    )  # fmt: skip
