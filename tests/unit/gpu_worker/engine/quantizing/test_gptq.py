"""GPTQ and AWQ give smaller errors of a layer's outputs than rounding to the nearest number does."""

import pytest
import torch
from torch import nn

from common.settings.settings import SettingError
from gpu_worker.engine.quantizing.awq import scale_inputs
from gpu_worker.engine.quantizing.gptq import output_error, solve
from gpu_worker.engine.quantizing.grid import Grid
from gpu_worker.engine.quantizing.inputs import recording

SIZE = 32


def outliers(rows: int = 512, inputs: int = 64) -> torch.Tensor:
    """Inputs that depend on each other, some much larger than others."""
    torch.manual_seed(0)
    return torch.randn(rows, inputs) @ torch.randn(inputs, inputs) * torch.rand(inputs) ** 3


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_outputs_are_nearer_than_with_the_nearest_weights(bits: int, act_order: bool) -> None:
    rows, weight = outliers(), torch.randn(48, 64)
    weight[:, 5] = 0
    hessian, grid = rows.T @ rows / len(rows), Grid(bits, True, torch.float16)
    rounded = solve(weight, hessian, grid, SIZE, act_order, 0.01)
    nearest = grid.round_groups(weight, SIZE)
    own, other = (float(output_error(weight - it.widen(), hessian)) for it in (rounded, nearest))
    assert own < 0.8 * other
    assert int(rounded.quants.max()) < 2**bits and torch.equal(rounded.scales, rounded.scales.half().float())
    assert other == pytest.approx(
        float(((weight - nearest.widen()) @ rows.T).pow(2).sum() / len(rows)), rel=1e-3
    )


def test_few_tokens_are_damped_and_inputs_that_are_not_finite_refused() -> None:
    rows, weight, grid = outliers(3), torch.randn(8, 64), Grid(4, True, torch.float16)
    rounded = solve(weight, rows.T @ rows, grid, SIZE, True, 1e-9)
    assert rounded.widen().isfinite().all()
    with pytest.raises(SettingError, match=r"^--calibration: the inputs of a layer are not finite"):
        solve(weight, torch.full((64, 64), torch.nan), grid, SIZE, False, 0.01)


class Block(nn.Module):
    """A norm before two layers, the second of which multiplies the first's outputs by others."""

    def __init__(self, own_norm: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.up_proj = nn.Linear(64, 64)
        self.down_proj = nn.Linear(64, 48)
        self.own_norm = own_norm

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        normed = self.norm(rows)
        up: torch.Tensor = self.up_proj(normed) * torch.linspace(0.1, 9, 64)
        output: torch.Tensor = self.down_proj(up)
        return output if self.own_norm else output + normed.sum(-1, keepdim=True)


@torch.inference_mode()
@pytest.mark.parametrize("own_norm", [True, False])
def test_scaled_inputs_leave_the_layer_as_it_is(own_norm: bool) -> None:
    """A norm that gives others its outputs, too, is not changed."""
    rows, block = outliers(), Block(own_norm)
    norm, down = block.norm.weight.clone(), block.down_proj.weight.clone()
    expected, grid = block(rows), Grid(4, False, torch.float16)
    with recording(block, [block.up_proj, block.down_proj]) as recorder:
        block(rows)
        recorder.end_run()
    before = [group.hessian.clone() for group in recorder.groups]
    scale_inputs(block, recorder.groups, grid, SIZE, lambda: block(rows))
    assert torch.allclose(block(rows), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(block.norm.weight, norm) is not own_norm
    assert not torch.equal(block.down_proj.weight, down)
    assert not torch.equal(recorder.groups[1].hessian, before[1])
