"""Quantised weights of a layer, as a checkpoint's tensors say them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpu_worker.engine.quantization.blocks import LARGEST_BLOCK, SMALLEST_BLOCK, Blocks

Config = Mapping[str, Any]
"""What config.json says of the quantisation."""
Fields = Mapping[str, torch.Tensor]
"""A layer's tensors, by their names in it."""
Stored = Mapping[str, Any]
"""The same in a safetensors file, not read yet."""


@dataclass
class ScaledFloats:
    """Weights [outputs, inputs] as 8-bit floats, each to be multiplied with the scale of its part.

    Attributes:
        values: 8-bit floats [outputs, inputs].
        scales: float32 [parts along the outputs, parts along the inputs].
        part: outputs and inputs of a part; the last ones may be smaller.
    """

    values: torch.Tensor
    scales: torch.Tensor
    part: tuple[int, int]

    def widen(self) -> torch.Tensor:
        """float32 [outputs, inputs]"""
        outputs, inputs = (
            torch.arange(size) // width for size, width in zip(self.values.shape, self.part, strict=True)
        )
        return self.values.float() * self.scales[outputs][:, inputs]

    def output_scales(self) -> torch.Tensor:
        """float32 [outputs, parts along the inputs]"""
        return self.scales.repeat_interleave(self.part[0], 0)[: len(self.values)]


Weight = Blocks | ScaledFloats | torch.Tensor
"""Integers in blocks, scaled floats, or float32 [outputs, inputs]."""


def widen(weight: Weight) -> torch.Tensor:
    """float32 [outputs, inputs]"""
    if isinstance(weight, Blocks):
        return weight.widen(torch.float32)
    return weight.widen() if isinstance(weight, ScaledFloats) else weight.float()


def scale_floats(
    values: torch.Tensor, scales: torch.Tensor, part: tuple[int, int] | None = None
) -> ScaledFloats:
    """8-bit floats [outputs, inputs] with scales of any float dtype: one, one for each output, or [parts
    along the outputs, parts along the inputs], then with the `part`'s size where it is known; else they are
    equal. Raises ValueError.
    """
    scales = scales.float()
    table = scales if scales.dim() == 2 else scales.reshape(-1, 1)
    if part is None or table.numel() == 1 or table.shape == (len(values), 1):
        part = equal_part(values, table)
    counts = [-(-size // width) for size, width in zip(values.shape, part, strict=True)]
    if list(table.shape) != counts:
        raise ValueError(f"scales {list(scales.shape)} do not fit weights {list(values.shape)}")
    return ScaledFloats(values, table, part)


def equal_part(values: torch.Tensor, table: torch.Tensor) -> tuple[int, int]:
    """How many outputs and inputs share a scale, where 8-bit floats [outputs, inputs] have scales [parts
    along the outputs, parts along the inputs] of any dtype. Raises ValueError.
    """
    (outputs, inputs), (rows, columns) = values.shape, table.shape
    if outputs % rows or inputs % columns:
        scales = f"scales {list(table.shape)} of blocks whose size the config does not name"
        raise ValueError(f"{scales} do not divide weights {list(values.shape)}")
    return outputs // rows, inputs // columns


def scale_integers(
    quants: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    size: int,
    groups: torch.Tensor | None = None,
) -> Blocks | torch.Tensor:
    """Weights (quant - zero) * scale, of each group of inputs its own; in blocks where a group has `size`
    inputs and the kernels' sums are exact.

    quants uint8, then with zeros, or int8 [outputs, inputs]; scales of any float dtype and zeros, integers,
    [outputs, groups]; `groups`, integers [inputs]: of each input. Raises ValueError.
    """
    outputs, inputs = quants.shape
    in_turn = torch.arange(inputs) // size
    expected = [outputs, -(-inputs // size) if groups is None else scales.shape[-1]]
    if list(scales.shape) != expected:
        raise ValueError(f"scales {list(scales.shape)} do not fit weights {[outputs, inputs]}")
    groups = in_turn if groups is None else groups.long()
    width = math.gcd(size, LARGEST_BLOCK, inputs)
    exact = zeros is None or any(
        torch.equal(scales.to(kind).to(scales.dtype), scales) for kind in (torch.half, torch.bfloat16)
    )
    order = None if torch.equal(groups, in_turn) else groups.argsort(stable=True)
    even = order is None or torch.equal(groups[order], in_turn)
    if not even or width < SMALLEST_BLOCK or not exact:
        centred = quants.float() if zeros is None else quants.float() - zeros.float()[:, groups]
        return centred * scales.float()[:, groups]
    if quants.dtype == torch.uint8 and quants.max() > 15 and zeros is not None:
        quants, zeros = (quants.short() - 128).to(torch.int8), zeros.short() - 128
    columns = in_turn[::width]
    quants = quants if order is None else quants[:, order]
    offsets = None if zeros is None else (-zeros.float() * scales.float())[:, columns]
    return Blocks(quants, scales.float()[:, columns], offsets, order=order).halved()
