"""Linear layers whose weights stay in blocks, on CUDA: a half or a quarter of the bytes of bfloat16.

Linear layers of 8-bit floats (e4m3), on CUDA: half of the bytes of bfloat16.

Weights are [outputs, inputs], rows [..., inputs] of bfloat16.

Products of the same input in one, on CUDA: a bigger product is nearer to the card's bandwidth than its
parts.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Optional

import torch
from torch import nn
from torch.nn import functional

from gpu_worker.engine.quantization.blocks import Blocks

BLOCK_UNIT = 32
"""Inputs that the kernel multiplies at once; with 4 bits, twice as many lie in the same bytes."""
BLOCK_CAPABILITY = (8, 0)
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
        return multiply_in_blocks(rows, self.order, *tensors)


def constant(tensor: torch.Tensor) -> nn.Parameter:
    """[...] of any dtype"""
    return nn.Parameter(tensor, requires_grad=False)


def pack(quants: torch.Tensor) -> torch.Tensor:
    """uint8 from 0 to 15 [outputs, inputs] → bytes [outputs, inputs / 2]: of each two units of inputs, the
    first lies in the lower halves.
    """
    pairs = quants.view(len(quants), -1, 2, BLOCK_UNIT)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def multiply_in_blocks(
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

    return multiply_tiles(rows, weight, scales, offsets, codes, bias, BLOCK_UNIT)


@multiply_blocks.register_fake
def shape_of(rows: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
    """The result of `multiply_blocks` without numbers: [n, outputs] of the rows' dtype"""
    return rows.new_empty(len(rows), len(weight))


def blocks_fit(blocks: Blocks) -> bool:
    """Whether the kernel multiplies them."""
    return blocks.quants.shape[1] % (BLOCK_UNIT * 8 // blocks.bits) == 0


def multiplies_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this card multiplies rows of this dtype with integers in blocks."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= BLOCK_CAPABILITY
    )


def converts_floats(device: torch.device) -> bool:
    """Whether this card converts 8-bit floats."""
    return torch.cuda.get_device_capability(device) >= COMPUTE_CAPABILITY_OF_FLOATS


DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
SMALLEST_ROW = 1e-12
"""A row of smaller numbers is rounded as if this were its largest."""
FP8_UNIT = 16
"""Sizes of matrices are multiples of it."""
FP8_CAPABILITY = (8, 9)
"""Of the first cards that multiply 8-bit floats."""


class Fp8Linear(nn.Module):
    """Stands for a linear layer: rows [..., inputs] bfloat16 → [..., outputs]. weight e4m3 [outputs, inputs],
    scales float32 [outputs, 1]
    """

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features = weight.shape[0]
        self.in_features = weight.shape[1]
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return multiply_fp8_rows(rows, self.weight, self.scales, self.bias)


def multiply_fp8_rows(
    rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """rows [..., inputs], weight e4m3 [outputs, inputs], scales float32 [outputs, 1], bias [outputs] →
    [..., outputs] of the rows' dtype. Each row is rounded to 8-bit floats with a scale of its own.
    """
    values, factors = round_rows(rows.reshape(-1, rows.shape[-1]))
    product = torch._scaled_mm(
        values, weight.t(), scale_a=factors, scale_b=scales.t(), bias=bias, out_dtype=rows.dtype
    )
    return product.view(*rows.shape[:-1], len(weight))


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, numbers] of any float dtype → e4m3 [rows, numbers], and float32 [rows, 1] to multiply these
    with
    """
    scales = rows.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST_ROW) / LARGEST
    return (rows.float() / scales).clamp(-LARGEST, LARGEST).to(DTYPE), scales


def fp8_fits(weight: torch.Tensor) -> bool:
    """Whether weights [outputs, inputs] of any dtype can be multiplied so."""
    return weight.dim() == 2 and all(size % FP8_UNIT == 0 for size in weight.shape)


GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that model code calls one after the other with the same input."""
JOINED = ("weight", "bias", "scales", "offsets")
"""Tensors of linear layers that have an entry for each output; not all layers have each."""
SHARED = ("codes", "order")
"""Tensors that must be the same in all of a group."""


class FusedLinear:
    """The weights of a group, with scales and more where they are quantised, and its last product while
    slices of it are still to be read. Rows are [..., inputs] of the model's dtype, a slice of the product
    [..., outputs of one layer].
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        self.kind = type(linears[0])
        self.weight = joined(linears, "weight")
        self.bias = joined(linears, "bias")
        self.scales = joined(linears, "scales")
        self.offsets = joined(linears, "offsets")
        self.codes = getattr(linears[0], "codes", None)
        self.order = getattr(linears[0], "order", None)
        self.sizes = [linear.out_features for linear in linears]
        self.multiplied: torch.Tensor | None = None
        self.parts: tuple[torch.Tensor, ...] = ()

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        self.multiplied = rows
        self.parts = torch.split(self.product(rows, slice(None)), self.sizes, -1)
        return self.parts[0]

    def product(self, rows: torch.Tensor, own: slice) -> torch.Tensor:
        weight, bias, scales, offsets = (
            None if tensor is None else tensor[own]
            for tensor in (self.weight, self.bias, self.scales, self.offsets)
        )
        assert weight is not None
        if self.kind is BlockLinear:
            return multiply_in_blocks(rows, self.order, weight, scales, offsets, self.codes, bias)
        if scales is not None:
            return multiply_fp8_rows(rows, weight, scales, bias)
        return functional.linear(rows, weight, bias)

    def output_of(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Return one layer's slice of the last product; computed by itself where that had another input, as
        model code may call the layers in another order.
        """
        if self.multiplied is not rows:
            begin = sum(self.sizes[:number])
            return self.product(rows, slice(begin, begin + self.sizes[number]))
        part = self.parts[number]
        if number == len(self.sizes) - 1:
            self.multiplied, self.parts = None, ()
        return part


class FusedLinearSlice(nn.Module):
    """Stands for one linear layer of a group; rows [..., inputs] of the weights' dtype → [..., outputs]. The
    first one owns the weights.
    """

    def __init__(self, fused: FusedLinear, number: int, linear: nn.Linear) -> None:
        super().__init__()
        self.fused = fused
        self.number = number
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        if number == 0:
            for name in (*JOINED, *SHARED):
                setattr(self, name, getattr(fused, name))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.fused.output_of(self.number, rows) if self.number else self.fused.multiply(rows)


def fuse_linears(model: nn.Module) -> None:
    """Replace the groups of linear layers of a model."""
    for module in list(model.modules()):
        for names in GROUPS:
            linears = [getattr(module, name, None) for name in names]
            if (
                all(is_unchanged_linear(linear) for linear in linears)
                and len({signature_of(linear) for linear in linears}) == 1
            ):
                fused = FusedLinear(linears)
                for number, (name, linear) in enumerate(zip(names, linears, strict=True)):
                    setattr(module, name, FusedLinearSlice(fused, number, linear))  # type: ignore[arg-type]


def is_unchanged_linear(linear: Any) -> bool:
    """Whether a layer is linear and nobody has changed what it computes."""
    return type(linear) in (nn.Linear, Fp8Linear, BlockLinear) and "forward" not in vars(linear)


def signature_of(linear: Any) -> tuple[object, ...]:
    """What layers have in common that can be a group."""
    tensors = [getattr(linear, name, None) for name in JOINED]
    kinds = [None if tensor is None else (tensor.dtype, tensor.shape[1:]) for tensor in tensors]
    shared = [getattr(linear, name, None) for name in SHARED]
    contents = [None if tensor is None else tuple(tensor.tolist()) for tensor in shared]
    return type(linear), linear.in_features, *kinds, *contents


def joined(linears: Sequence[Any], name: str) -> nn.Parameter | None:
    """The tensors [outputs, ...] of several layers, of any dtype, in one; None where they have none."""
    tensors = [tensor for linear in linears if (tensor := getattr(linear, name, None)) is not None]
    return nn.Parameter(torch.cat(tensors), requires_grad=False) if tensors else None
