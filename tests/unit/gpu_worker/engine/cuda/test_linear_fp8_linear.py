"""Linear layers of 8-bit floats; newer versions of torch multiply these on CPU, too."""

import pytest
import torch
from torch import nn

from gpu_worker.engine.cuda.linear import (
    FP8_MAX,
    Fp8Linear,
    FusedLinearSlice,
    fits_fp8_kernel,
    fuse_linears,
    round_rows,
)
from tests.support.engine.quantized_models import multiplies_floats

NEEDS_PRODUCTS = pytest.mark.skipif(
    not multiplies_floats(),
    reason="this torch has such products on CUDA only",
)


def make(outputs: int, seed: int) -> Fp8Linear:
    torch.manual_seed(seed)
    values, scales = round_rows(torch.randn(outputs, 64))
    return Fp8Linear(values, scales, torch.randn(outputs).bfloat16())


class Group(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = make(32, 0)
        self.k_proj = make(16, 1)
        self.v_proj = make(16, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.q_proj(rows), self.k_proj(rows), self.v_proj(rows), self.k_proj(2 * rows)), -1)


def test_each_row_has_a_scale_of_its_own() -> None:
    rows = torch.tensor([[1.0, -2.0], [1e4, 3.0], [0.0, 0.0]])
    values, scales = round_rows(rows)
    assert values.float().abs().amax(1).tolist() == [FP8_MAX, FP8_MAX, 0]
    torch.testing.assert_close(values.float() * scales, rows, rtol=2**-4, atol=1e-3)


@NEEDS_PRODUCTS
def test_products_are_those_of_the_rounded_numbers() -> None:
    linear, rows = make(32, 0), torch.randn(2, 3, 64).bfloat16()
    values, scales = round_rows(rows.view(6, 64))
    assert linear.bias is not None
    weight = linear.weight.float() * linear.scales
    expected = (values.float() * scales) @ weight.T + linear.bias.float()
    torch.testing.assert_close(linear(rows).float(), expected.view(2, 3, 32), rtol=2**-7, atol=2**-5)


@NEEDS_PRODUCTS
def test_merged_products_equal_those_of_the_parts() -> None:
    model, rows = Group(), torch.randn(5, 64).bfloat16()
    expected = model(rows)
    fuse_linears(model)
    assert isinstance(model.q_proj, FusedLinearSlice) and model.q_proj.weight.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(model(rows), expected)


def test_sizes_that_the_cards_do_not_multiply() -> None:
    assert (
        fits_fp8_kernel(torch.empty(16, 32))
        and not fits_fp8_kernel(torch.empty(16, 40))
        and not fits_fp8_kernel(torch.empty(2, 16, 16))
    )
