"""The Triton kernel that multiplies rows with weights in blocks. In the loop over inputs it expands the
weights tile by tile to the numbers and the dtype that dequantising would give.
"""

import torch
import triton
import triton.language as tl

FEW = 16
"""Rows of the smallest tile: a matrix unit multiplies no fewer."""
OPTIONS = {"num_stages": 4, "enable_fp_fusion": False}
"""No fused products and sums: scale and offset are rounded one after the other, as dequantising does."""


@triton.jit  # type: ignore[untyped-decorator]
def expand(
    quants: tl.tensor, scales: tl.tensor, offsets: tl.tensor, codes: tl.tensor, first: tl.tensor,
    output: tl.tensor, there: tl.tensor, groups: tl.tensor, size: tl.constexpr, part: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """quants [part, outputs] from the input `first` on → float32 weights"""
    numbers = quants.to(tl.float32) if codes is None else tl.load(codes + quants)
    if size % part == 0:  # all of them are in one block
        place = output[None, :] * groups + first // size
    else:
        place = output[None, :] * groups + (first + tl.arange(0, part)[:, None]) // size
    weights = numbers * tl.load(scales + place, mask=there[None, :], other=0).to(tl.float32)
    if offsets is not None:
        weights += tl.load(offsets + place, mask=there[None, :], other=0).to(tl.float32)
    return weights


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def multiply_tile(
    rows: tl.tensor, quants: tl.tensor, scales: tl.tensor, offsets: tl.tensor, codes: tl.tensor,
    bias: tl.tensor, results: tl.tensor,
    num_rows: tl.tensor, inputs: tl.tensor, outputs: tl.tensor,
    size: tl.constexpr, halves: tl.constexpr, tile_rows: tl.constexpr, tile_outputs: tl.constexpr,
    part: tl.constexpr,
) -> None:  # fmt: skip
    """One program for a tile of rows and outputs. `halves`: parts in the same bytes, 2 or 1."""
    row = tl.program_id(1).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    output = tl.program_id(0).to(tl.int64) * tile_outputs + tl.arange(0, tile_outputs)
    some, there, column = row < num_rows, output < outputs, tl.arange(0, part)
    dtype: tl.constexpr = rows.dtype.element_ty
    groups = inputs // size
    total = tl.full((tile_rows, tile_outputs), 0.0, tl.float32)
    for first in range(0, inputs, halves * part):
        place = output[None, :] * (inputs // halves) + first // halves + column[:, None]
        octets = tl.load(quants + place, mask=there[None, :])
        for half in tl.static_range(halves):
            begin = first + half * part
            own = octets if halves == 1 else (octets >> 4 * half) & 15
            weights = expand(own, scales, offsets, codes, begin, output, there, groups, size, part)
            origin = row[:, None] * inputs + begin + column[None, :]
            factors = tl.load(rows + origin, mask=some[:, None], other=0)
            total = tl.dot(factors, weights.to(dtype), total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + output, mask=there, other=0).to(tl.float32)[None, :]
    target = row[:, None] * outputs + output[None, :]
    tl.store(results + target, total.to(dtype), mask=some[:, None] & there[None, :])


def multiply_tiles(
    rows: torch.Tensor,
    quants: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    codes: torch.Tensor | None,
    bias: torch.Tensor | None,
    part: int,
) -> torch.Tensor:
    """rows [n, inputs] and bias [outputs] of the model's dtype; quants as QuantisedLinear packs them; scales
    and offsets float16 or float32 [outputs, blocks], codes float32 [16] → [n, outputs] of the rows' dtype.
    `part`: inputs multiplied at once.
    """
    num_rows, inputs = rows.shape
    outputs, groups = scales.shape
    results = rows.new_empty(num_rows, outputs)
    halves = inputs // quants.shape[1]
    tile_rows = min(64, max(FEW, triton.next_power_of_2(num_rows)))
    tile_outputs = 32 if tile_rows == FEW else 64
    grid = triton.cdiv(outputs, tile_outputs), triton.cdiv(num_rows, tile_rows)
    multiply_tile[grid](
        rows, quants, scales, offsets, codes, bias, results, num_rows, inputs, outputs,
        inputs // groups, halves, tile_rows, tile_outputs, part, **OPTIONS,
    )  # fmt: skip
    return results
