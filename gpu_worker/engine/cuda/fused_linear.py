"""Products of the same input in one, on CUDA: a bigger product is nearer to the card's bandwidth than its
parts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpu_worker.engine.cuda.fp8_linear import Fp8Linear, multiply

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that model code calls one after the other with the same input."""


class FusedLinear:
    """The weights of a group, with scales where they are 8-bit floats, and its last product while slices of
    it are still to be read. Rows are [..., inputs] of the weights' dtype, a slice of the product [...,
    outputs of one layer].
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        self.weight = nn.Parameter(torch.cat(tuple(linear.weight for linear in linears)), requires_grad=False)
        biases = tuple(linear.bias for linear in linears)
        self.bias = None if biases[0] is None else nn.Parameter(torch.cat(biases), requires_grad=False)
        scales = [linear.scales.data for linear in linears if isinstance(linear, Fp8Linear)]
        self.scales = nn.Parameter(torch.cat(scales), requires_grad=False) if scales else None
        self.sizes = [linear.out_features for linear in linears]
        self.multiplied: torch.Tensor | None = None
        self.parts: tuple[torch.Tensor, ...] = ()

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        self.multiplied = rows
        self.parts = torch.split(self.product(rows, slice(None)), self.sizes, -1)
        return self.parts[0]

    def product(self, rows: torch.Tensor, own: slice) -> torch.Tensor:
        bias = None if self.bias is None else self.bias[own]
        if self.scales is None:
            return functional.linear(rows, self.weight[own], bias)
        return multiply(rows, self.weight[own], self.scales[own], bias)

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
            self.weight = fused.weight
            self.bias = fused.bias
            self.scales = fused.scales

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.fused.output_of(self.number, rows) if self.number else self.fused.multiply(rows)


def fuse_linears(model: nn.Module) -> None:
    """Replaces the groups of linear layers of a model."""
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
    """Nobody has changed what it computes."""
    return type(linear) in (nn.Linear, Fp8Linear) and "forward" not in vars(linear)


def signature_of(linear: Any) -> tuple[int, bool, torch.dtype]:
    return linear.in_features, linear.bias is None, linear.weight.dtype
