"""Products of the same input in one, on CUDA: a bigger product is nearer to the card's bandwidth than its
parts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpu_worker.engine.cuda import block_linear, fp8_linear
from gpu_worker.engine.cuda.block_linear import BlockLinear
from gpu_worker.engine.cuda.fp8_linear import Fp8Linear

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
            return block_linear.multiply(rows, self.order, weight, scales, offsets, self.codes, bias)
        if scales is not None:
            return fp8_linear.multiply(rows, weight, scales, bias)
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
