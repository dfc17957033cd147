"""Linear layers on CUDA: with weights in blocks or of 8-bit floats, and fused ones.

Quantised weights take a half or a quarter of the bytes of bfloat16. Layers with the same input are fused,
since a bigger product is nearer to the card's bandwidth.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Optional

import torch
from torch import nn
from torch.nn import functional

from gpu_worker.engine.quantization.blocks import Blocks

INPUTS_AT_ONCE = 32
"""Inputs that the kernel of blocks multiplies at once; with 4 bits, twice as many lie in the same bytes."""
BFLOAT16_CAPABILITY = (8, 0)
"""Compute capability of the first cards whose matrix units multiply bfloat16."""
FP8_CAPABILITY = (8, 9)
"""Compute capability of the first cards that convert and multiply 8-bit floats."""
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
FP8_MULTIPLE = 16
"""Rows and columns of matrices of 8-bit floats are multiples of this."""
LEAST_MAXIMUM = 1e-12
"""A row of smaller numbers is rounded as if this were its largest."""
FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that model code calls one after the other with the same input."""
JOINED = ("weight", "scales", "offsets", "bias")
"""Tensors with an entry for each output, which the layers of a group join; not all layers have each."""
SHARED = ("order", "codes")
"""Tensors that must be the same in all layers of a group."""


class QuantisedLinear(nn.Module):
    """Replaces a linear layer: rows [..., inputs] of bfloat16 or float16 → [..., outputs]. All tensors are
    parameters, so that they move with the model.

    Attributes:
        weight: quants [outputs, inputs], those of 4 bits packed in [outputs, inputs / 2].
        scales, offsets, codes, order: as in Blocks; None if it has none.
    """

    def __init__(self, blocks: Blocks, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = blocks.quants.shape
        self.weight = constant(pack(blocks.quants) if blocks.bits == 4 else blocks.quants.contiguous())
        self.scales = constant(blocks.scales.contiguous())
        self.offsets = None if blocks.offsets is None else constant(blocks.offsets.contiguous())
        self.codes = None if blocks.codes is None else constant(blocks.codes.float())
        self.order = None if blocks.order is None else constant(blocks.order)
        self.bias = None if bias is None else constant(bias.detach())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return product(rows, self.order, self.codes, self.weight, self.scales, self.offsets, self.bias)


def product(
    rows: torch.Tensor,
    order: torch.Tensor | None,
    codes: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """rows [..., inputs], tensors as in QuantisedLinear, or plain weights without scales → [..., outputs] of
    the rows' dtype. 8-bit floats with one scale for an output are multiplied as such, all others from blocks.
    """
    if scales is None:
        return functional.linear(rows, weight, bias)
    if weight.dtype == FP8 and scales.shape[1] == 1:
        return fp8_linear(rows, weight, scales, bias)
    in_order = rows if order is None else rows[..., order]
    outputs: torch.Tensor = multiply_blocks(
        in_order.reshape(-1, rows.shape[-1]).contiguous(), weight, scales, offsets, codes, bias
    )
    return outputs.view(*rows.shape[:-1], len(weight))


def constant(tensor: torch.Tensor) -> nn.Parameter:
    """tensor [...] of any dtype → a parameter without gradients"""
    return nn.Parameter(tensor, requires_grad=False)


def pack(quants: torch.Tensor) -> torch.Tensor:
    """uint8 from 0 to 15 [outputs, inputs] → bytes [outputs, inputs / 2]. Of each 2 * INPUTS_AT_ONCE inputs,
    the first half lies in the lower halves of the bytes.
    """
    pairs = quants.view(len(quants), -1, 2, INPUTS_AT_ONCE)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


@torch.library.custom_op("tokenfleet::multiply_blocks", mutates_args=())
def multiply_blocks(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    offsets: Optional[torch.Tensor],  # noqa: UP045  (schemas are read from annotations)
    codes: Optional[torch.Tensor],  # noqa: UP045
    bias: Optional[torch.Tensor],  # noqa: UP045
) -> torch.Tensor:
    """rows [n, inputs] of bfloat16 or float16, tensors as in QuantisedLinear → [n, outputs]"""
    from gpu_worker.engine.cuda.kernels.products import multiply_tiles  # Triton: in CUDA builds only

    return multiply_tiles(rows, weight, scales, offsets, codes, bias, INPUTS_AT_ONCE)


@multiply_blocks.register_fake
def shape_of(rows: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
    """The result of `multiply_blocks` without its numbers: [n, outputs] of the rows' dtype"""
    return rows.new_empty(len(rows), len(weight))


def fits_block_kernel(blocks: Blocks) -> bool:
    """Whether the kernel multiplies blocks of this shape."""
    return blocks.quants.shape[1] % (INPUTS_AT_ONCE * 8 // blocks.bits) == 0


def multiplies_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies rows of this dtype with weights in blocks."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY
    )


def has_fp8(device: torch.device) -> bool:
    """Whether the device converts and multiplies 8-bit floats."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies rows of this dtype as 8-bit floats."""
    return dtype == torch.bfloat16 and has_fp8(device)


def fp8_linear(
    rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """rows [..., inputs], weight e4m3 [outputs, inputs], scales float32 [outputs, 1], bias [outputs] → [...,
    outputs] of the rows' dtype. Each row is rounded to 8-bit floats with a scale of its own.
    """
    values, factors = round_rows(rows.reshape(-1, rows.shape[-1]))
    product = torch._scaled_mm(
        values, weight.t(), scale_a=factors, scale_b=scales.t(), bias=bias, out_dtype=rows.dtype
    )
    return product.view(*rows.shape[:-1], len(weight))


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, numbers] of any float dtype → e4m3 [rows, numbers], and their scales float32 [rows, 1]"""
    scales = rows.abs().amax(-1, keepdim=True).float().clamp(min=LEAST_MAXIMUM) / FP8_MAX
    return (rows.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def fits_fp8_kernel(weight: torch.Tensor) -> bool:
    """Whether weights [outputs, inputs] of any dtype have a shape that can be multiplied as 8-bit floats."""
    return weight.dim() == 2 and all(size % FP8_MULTIPLE == 0 for size in weight.shape)


class FusedLinear:
    """The joined layers of a group. Rows are [..., inputs] of the model's dtype, a part of a product [...,
    outputs of one layer].

    Attributes:
        shared: tensors that are the same in all layers, by SHARED.
        joined: tensors with an entry for each output, by JOINED.
        multiplied, parts: the rows of the last product, and its parts, until the last layer has read its own.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        self.shared = [getattr(linears[0], name, None) for name in SHARED]
        self.joined = [joined(linears, name) for name in JOINED]
        self.sizes = [linear.out_features for linear in linears]
        self.multiplied: torch.Tensor | None = None
        self.parts: tuple[torch.Tensor, ...] = ()

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        self.multiplied = rows
        self.parts = torch.split(product(rows, *self.shared, *self.joined), self.sizes, -1)  # type: ignore[arg-type]
        return self.parts[0]

    def output_of(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Return one layer's part of the last product. If that had another input, since model code may call
        the layers in another order, the part is computed by itself.
        """
        if self.multiplied is not rows:
            begin = sum(self.sizes[:number])
            end = begin + self.sizes[number]
            own = [None if tensor is None else tensor[begin:end] for tensor in self.joined]
            return product(rows, *self.shared, *own)  # type: ignore[arg-type]
        part = self.parts[number]
        if number == len(self.sizes) - 1:
            self.multiplied, self.parts = None, ()
        return part


class FusedLinearSlice(nn.Module):
    """Replaces one linear layer of a group: rows [..., inputs] of the weights' dtype → [..., outputs]. The
    first one owns the weights.
    """

    def __init__(self, fused: FusedLinear, number: int, linear: nn.Linear) -> None:
        super().__init__()
        self.fused = fused
        self.number = number
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        if number == 0:
            for name, tensor in zip((*SHARED, *JOINED), (*fused.shared, *fused.joined), strict=True):
                setattr(self, name, tensor)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.fused.output_of(self.number, rows) if self.number else self.fused.multiply(rows)


def fuse_linears(model: nn.Module) -> None:
    """Fuse the groups of linear layers of a model."""
    for module in list(model.modules()):
        for names in FUSED_GROUPS:
            linears = [getattr(module, name, None) for name in names]
            if (
                {type(linear) for linear in linears} <= {nn.Linear, QuantisedLinear}
                and not any("forward" in vars(linear) for linear in linears)
                and len({signature_of(linear) for linear in linears}) == 1
            ):
                fused = FusedLinear(linears)
                for number, (name, linear) in enumerate(zip(names, linears, strict=True)):
                    setattr(module, name, FusedLinearSlice(fused, number, linear))  # type: ignore[arg-type]


def signature_of(linear: Any) -> tuple[object, ...]:
    """What the layers of a group must have in common."""
    tensors = [getattr(linear, name, None) for name in JOINED]
    kinds = [None if tensor is None else (tensor.dtype, tensor.shape[1:]) for tensor in tensors]
    shared = [getattr(linear, name, None) for name in SHARED]
    contents = [None if tensor is None else tuple(tensor.tolist()) for tensor in shared]
    return type(linear), linear.in_features, *kinds, *contents


def joined(linears: Sequence[Any], name: str) -> nn.Parameter | None:
    """The tensors [outputs, ...] of several layers, of any dtype, in one; None if they have none."""
    tensors = [tensor for linear in linears if (tensor := getattr(linear, name, None)) is not None]
    return constant(torch.cat(tensors)) if tensors else None
