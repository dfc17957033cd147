"""The kernel of products with weights in blocks, computed by torch: where Triton is not installed."""

import sys
from types import ModuleType

import pytest
import torch

from gpu_worker.engine.cuda.linear import INPUTS_AT_ONCE
from gpu_worker.engine.quantization.blocks import Blocks

KERNELS = "gpu_worker.engine.cuda.kernels.products"


def install(patch: pytest.MonkeyPatch) -> None:
    module = ModuleType(KERNELS)
    vars(module)["multiply_tiles"] = multiply_tiles
    patch.setitem(sys.modules, KERNELS, module)


def multiply_tiles(
    rows: torch.Tensor,
    quants: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    codes: torch.Tensor | None,
    bias: torch.Tensor | None,
    part: int,
) -> torch.Tensor:
    """As the kernel's."""
    weight = Blocks(unpack(quants), scales, offsets, codes).widen(rows.dtype)
    return torch.nn.functional.linear(rows, weight, bias)


def unpack(quants: torch.Tensor) -> torch.Tensor:
    """As QuantisedLinear's → [outputs, inputs]"""
    if quants.dtype != torch.uint8:
        return quants
    parts = quants.view(len(quants), -1, INPUTS_AT_ONCE)
    return torch.stack([parts & 15, parts >> 4], 2).flatten(1)
