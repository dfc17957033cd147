"""Weights of a layer are the same numbers in blocks, in parts of blocks, and plain."""

import pytest
import torch
from torch import nn

from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.packed_linear import LargePages, NativeLinear
from gpu_worker.engine.quantization.blocks import Blocks
from gpu_worker.engine.quantization.integers import read_int8
from gpu_worker.engine.quantization.weight import scale_floats, scale_integers, widen
from tests.support.engine.quantized_models import mean, multiplies_blocks

INPUTS = 384


def make(bits: int, size: int) -> tuple[Blocks | torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    quants = torch.randint(0, 2**bits, (40, INPUTS), generator=random).to(torch.uint8)
    groups = INPUTS // size
    zeros = torch.randint(0, 2**bits, (40, groups), generator=random)
    scales = torch.rand(40, groups, generator=random).half()
    return scale_integers(quants, scales, zeros, size), mean(quants, scales, zeros)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [32, 48, 64, 128, 192, INPUTS])
def test_blocks_of_every_size_are_multiplied_like_plain_weights(bits: int, size: int) -> None:
    blocks, expected = make(bits, size)
    assert isinstance(blocks, Blocks) and torch.equal(widen(blocks), expected) and blocks.bits == bits
    if not multiplies_blocks():
        pytest.skip("weights are widened on this processor")
    library, linear = native.library(), nn.Linear(INPUTS, 40, bias=False)
    assert library
    linear.weight = nn.Parameter(expected.bfloat16(), requires_grad=False)
    plain = NativeLinear(linear, library, True, LargePages())
    own = NativeLinear(linear, library, True, LargePages(), blocks, plain=False)
    rows = torch.randn(40, INPUTS, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert all(torch.equal(plain(rows[:count]), own(rows[:count])) for count in (1, 3, 40))


def test_parts_of_blocks_begin_where_blocks_do_not() -> None:
    blocks, expected = make(4, 128)
    assert isinstance(blocks, Blocks)
    part = blocks.of_columns(64, 320)
    assert part and part.size == 64 and torch.equal(widen(part), expected[:, 64:320])
    assert blocks.of_columns(8, 128) is None
    rows = torch.arange(3, 17)
    assert torch.equal(widen(blocks.of_rows(rows)), expected[3:17])


def test_weights_without_blocks_are_plain() -> None:
    """Where groups have several sizes, one that fits no kernel, or sums would be rounded."""
    quants, zeros = torch.arange(16, dtype=torch.uint8).repeat(2, 2), torch.full((2, 2), 3)
    scales = torch.tensor([[0.5, 2.0]] * 2)
    mixed = (torch.arange(32) % 3).clamp(max=1)
    found = scale_integers(quants, scales, zeros, 16, mixed)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, (quants.float() - 3) * scales[:, mixed])
    mixed = torch.arange(32) % 2
    found = scale_integers(quants, scales, zeros, 16, mixed)
    assert isinstance(found, Blocks) and found.of_columns(0, 16) is None
    assert torch.equal(widen(found), (quants.float() - 3) * scales[:, mixed])
    assert isinstance(scale_integers(quants[:, :24], scales, zeros, 12), torch.Tensor)
    assert isinstance(scale_integers(quants, scales / 3, zeros, 16), torch.Tensor)
    assert isinstance(scale_integers(quants, scales, zeros, 16), Blocks)


def test_parts_of_floats_may_end_early() -> None:
    values = torch.ones(5, 7).to(torch.float8_e4m3fn)
    scales = torch.arange(6.0).view(2, 3)
    assert scale_floats(values, scales, (4, 3)).widen()[3:, 2:].tolist() == [[0, 1, 1, 1, 2], [3, 4, 4, 4, 5]]
    with pytest.raises(ValueError, match=r"scales \[2, 3\] do not fit weights \[5, 7\]"):
        scale_floats(values, scales, (2, 3))


def test_parts_of_a_size_that_no_config_names_are_equal() -> None:
    values = torch.ones(576, 128).to(torch.float8_e4m3fn)
    assert scale_floats(values, torch.ones(4, 2)).part == (144, 64)
    with pytest.raises(ValueError, match=r"scales \[5, 1\] of blocks .* do not divide weights \[576, 128\]"):
        scale_floats(values, torch.ones(5, 1))
    quants = {"weight": torch.ones(2, 576, dtype=torch.int8), "weight_scale": torch.ones(2, 5)}
    with pytest.raises(ValueError, match=r"5 groups do not divide 576 inputs"):
        read_int8(quants, {})


def test_scales_of_more_groups_than_there_are_inputs_for_are_refused() -> None:
    quants = torch.ones(2, 32, dtype=torch.int8)
    assert widen(scale_integers(quants, torch.ones(2, 2), None, 16)).shape == (2, 32)
    with pytest.raises(ValueError, match=r"scales \[2, 4\] do not fit weights \[2, 32\]"):
        scale_integers(quants, torch.ones(2, 4), None, 16)
