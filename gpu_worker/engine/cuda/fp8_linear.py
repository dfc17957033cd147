"""Linear layers of 8-bit floats (e4m3), on CUDA: half of the bytes of bfloat16.

Weights are [outputs, inputs], rows [..., inputs] of bfloat16.
"""

import torch
from torch import nn

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
SMALLEST_ROW = 1e-12
"""A row of smaller numbers is rounded as if this were its largest."""
UNIT = 16
"""Sizes of matrices are multiples of it."""
COMPUTE_CAPABILITY = (8, 9)
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
        return multiply(rows, self.weight, self.scales, self.bias)


def multiply(
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


def fits(weight: torch.Tensor) -> bool:
    """Whether weights [outputs, inputs] of any dtype can be multiplied so."""
    return weight.dim() == 2 and all(size % UNIT == 0 for size in weight.shape)
