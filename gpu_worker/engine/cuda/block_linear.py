"""Linear layers whose weights stay in blocks, on CUDA: a half or a quarter of the bytes of bfloat16."""

from importlib.util import find_spec
from typing import Optional

import torch
from torch import nn

from gpu_worker.engine.blocks import Blocks

UNIT = 32
"""Inputs that the kernel multiplies at once; with 4 bits, twice as many lie in the same bytes."""
COMPUTE_CAPABILITY = (8, 0)
"""Of the first cards whose matrix units multiply bfloat16."""
COMPUTE_CAPABILITY_OF_FLOATS = (8, 9)
"""Of the first cards that convert 8-bit floats."""


class BlockLinear(nn.Module):
    """Stands for a linear layer: rows [..., inputs] of bfloat16 or float16 → [..., outputs]. All tensors are
    parameters, so that they move with the model.

    Attributes:
        weight: packed quants, [outputs, inputs / 2] or [outputs, inputs].
        scales, offsets, codes, order: as in Blocks; None where it has none.
    """

    def __init__(self, blocks: Blocks, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features = blocks.quants.shape[0]
        self.in_features = blocks.quants.shape[1]
        self.weight = constant(pack(blocks.quants) if blocks.bits == 4 else blocks.quants.contiguous())
        self.scales = constant(blocks.scales.contiguous())
        self.offsets = None if blocks.offsets is None else constant(blocks.offsets.contiguous())
        self.codes = None if blocks.codes is None else constant(blocks.codes.float())
        self.order = None if blocks.order is None else constant(blocks.order)
        self.bias = None if bias is None else constant(bias.detach())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        tensors = (self.weight, self.scales, self.offsets, self.codes, self.bias)
        return multiply(rows, self.order, *tensors)


def constant(tensor: torch.Tensor) -> nn.Parameter:
    """[...] of any dtype"""
    return nn.Parameter(tensor, requires_grad=False)


def pack(quants: torch.Tensor) -> torch.Tensor:
    """uint8 from 0 to 15 [outputs, inputs] → bytes [outputs, inputs / 2]: of each two units of inputs, the
    first lies in the lower halves.
    """
    pairs = quants.view(len(quants), -1, 2, UNIT)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def multiply(
    rows: torch.Tensor, order: torch.Tensor | None, weight: torch.Tensor, *factors: torch.Tensor | None
) -> torch.Tensor:
    """rows [..., inputs], tensors as of BlockLinear → [..., outputs] of the rows' dtype"""
    in_order = rows if order is None else rows[..., order]
    product: torch.Tensor = multiply_blocks(
        in_order.reshape(-1, rows.shape[-1]).contiguous(), weight, *factors
    )
    return product.view(*rows.shape[:-1], len(weight))


@torch.library.custom_op("tokenfleet::multiply_blocks", mutates_args=())
def multiply_blocks(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    offsets: Optional[torch.Tensor],  # noqa: UP045  (schemas are read from annotations)
    codes: Optional[torch.Tensor],  # noqa: UP045
    bias: Optional[torch.Tensor],  # noqa: UP045
) -> torch.Tensor:
    """rows [n, inputs] of bfloat16 or float16, tensors as of BlockLinear → [n, outputs]"""
    from gpu_worker.engine.cuda.kernels.products import (
        multiply_tiles,
    )  # Triton comes with torch's builds for CUDA only

    return multiply_tiles(rows, weight, scales, offsets, codes, bias, UNIT)


@multiply_blocks.register_fake
def shape_of(rows: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
    """The result of `multiply_blocks` without numbers: [n, outputs] of the rows' dtype"""
    return rows.new_empty(len(rows), len(weight))


def fits(blocks: Blocks) -> bool:
    """Whether the kernel multiplies them."""
    return blocks.quants.shape[1] % (UNIT * 8 // blocks.bits) == 0


def multiplies_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this card multiplies rows of this dtype with integers in blocks."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= COMPUTE_CAPABILITY
    )


def converts_floats(device: torch.device) -> bool:
    """Whether this card converts 8-bit floats."""
    return torch.cuda.get_device_capability(device) >= COMPUTE_CAPABILITY_OF_FLOATS
