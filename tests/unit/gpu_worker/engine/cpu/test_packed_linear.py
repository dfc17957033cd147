"""Products of packed weights against torch's."""

from typing import Any

import pytest
import torch
from torch import nn

from gpu_worker.engine.cpu import native, packed_linear
from gpu_worker.engine.cpu.large_pages import LargePages
from gpu_worker.engine.cpu.packed_linear import NativeLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(96, 144, False), (50, 7, True), (64, 100, True)])
def test_products_do_not_depend_on_the_batch(
    dtype: torch.dtype, whole: bool, inputs: int, outputs: int, bias: bool, library: Any
) -> None:
    """A row's result is the same bits alone and among others; whole, it is as exact as float32."""
    if not library.tf_multiplies(native.TYPE_CODES[dtype]):
        pytest.skip("torch's products are used on this processor")
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    packed = NativeLinear(linear, library, whole, LargePages())
    for num_rows in (*range(1, 10), 33):
        states = torch.randn(1, num_rows, inputs).to(dtype)
        expected = states.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
        result = packed(states)
        torch.testing.assert_close(
            result.double(), expected, rtol=2 * torch.finfo(result.dtype).eps, atol=1e-5
        )
        assert result.dtype == (torch.float32 if whole else dtype)
        assert all(torch.equal(packed(states[:, row]), result[:, row]) for row in range(num_rows))


@pytest.mark.parametrize(
    "rows",
    [torch.ones(2, 10), torch.ones(2, 6), torch.ones(2, 8, dtype=torch.bfloat16)],
    ids=["wide", "narrow", "type"],
)
def test_rows_that_do_not_fit_are_refused(rows: torch.Tensor, library: Any) -> None:
    """As torch does; nothing beyond them is read."""
    linear = nn.Linear(8, 8)
    packed = NativeLinear(linear, library, False, LargePages())
    for layer in (linear, packed):
        with pytest.raises(RuntimeError):
            layer(rows)


def test_wrong_products_are_not_used(
    library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = NativeLinear.product
    monkeypatch.setattr(
        NativeLinear,
        "product",
        lambda self, rows, biased: right(self, rows, biased) + 0.5 * (rows.shape[0] > 1),
    )
    monkeypatch.setattr(packed_linear, "multiplies_correctly", packed_linear.multiplies_correctly.__wrapped__)
    assert type(packed_linear.pack_linear(nn.Linear(8, 8), False, LargePages())) is not NativeLinear
    assert ("are wrong on this processor" in caplog.text) == bool(
        library.tf_multiplies(native.TYPE_CODES[torch.float32])
    )
