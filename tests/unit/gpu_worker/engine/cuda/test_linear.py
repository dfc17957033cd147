"""Linear layers of a GPU: weights that stay in blocks, 8-bit floats, and layers with one input, merged."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from gpu_worker.engine.cuda import linear as block_linear
from gpu_worker.engine.cuda.linear import (
    BlockLinear,
    Fp8Linear,
    FusedLinearSlice,
    fits_block_kernel,
    fuse_linears,
    has_fp8,
    multiplies_blocks,
    round_rows,
)
from gpu_worker.engine.model.quantized_linears import blocks_of, find_blocks, replace_linears, shard_blocks
from gpu_worker.engine.parallel.shards import make_tp_plan
from gpu_worker.engine.quantization.blocks import Blocks
from gpu_worker.engine.quantization.weight import ScaledFloats
from tests.support.engine import fake_products, quantized_models
from tests.support.engine.quantized_models import FORMATS, multiplies_floats

CUDA = torch.device("cuda", 0)
SLOW = ["gptq", "gptq-3", "gptq-8", "w4a16", "w4a16-asymmetric", "w8a8-int8", "bitsandbytes-8"]
QUICK = ["awq", "gptq-desc_act", "bitsandbytes-4-nested", "fp8-blocks"]


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with kernels that torch computes."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(block_linear, "find_spec", lambda name: name)
    fake_products.install(monkeypatch)


def make(outputs: int, order: torch.Tensor | None = None) -> BlockLinear:
    quants = torch.randint(0, 16, (outputs, 128)).to(torch.uint8)
    scales, offsets = torch.rand(outputs, 4).half(), torch.randn(outputs, 4).half()
    return BlockLinear(Blocks(quants, scales, offsets, order=order), torch.randn(outputs))


class Group(nn.Module):
    def __init__(self, *orders: torch.Tensor) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = map(make, (32, 16, 16), orders)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.q_proj(rows), self.k_proj(rows), self.v_proj(rows), self.k_proj(2 * rows)), -1)


def test_merged_products_equal_those_of_the_parts() -> None:
    """Layers whose inputs lie in different orders stay by themselves."""
    order, other = torch.randperm(128), torch.randperm(128)
    for orders, merged in (((order, order, order), True), ((order, other, order), False)):
        model, rows = Group(*orders), torch.randn(2, 5, 128)
        expected = model(rows)
        fuse_linears(model)
        assert isinstance(model.q_proj, FusedLinearSlice) == merged
        torch.testing.assert_close(model(rows), expected)


@torch.inference_mode()
@pytest.mark.parametrize("form", [*QUICK, *(pytest.param(form, marks=pytest.mark.slow) for form in SLOW)])
def test_a_checkpoints_own_numbers_are_multiplied(form: str, tmp_path: Path) -> None:
    """In float32 exactly; whole, and the parts of two ranks."""
    quantized_models.save(tmp_path, *FORMATS[form])
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    config = AutoConfig.from_pretrained(tmp_path)
    config.quantization_config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    plan = make_tp_plan(plain, 2)
    whole, parts = copy.deepcopy(plain), [copy.deepcopy(plain) for _ in range(2)]
    blocks = find_blocks(tmp_path, config, copy.deepcopy(plain).half(), CUDA)
    replace_linears(whole, blocks)
    for rank, part in enumerate(parts):
        replace_linears(part, shard_blocks(blocks, plan.shards, rank))
    found = {name: child for name, child in whole.named_modules() if type(child) is BlockLinear}
    assert len(found) == 21
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    for name, linear in found.items():
        expected = exact.get_parameter(f"{name}.weight")
        assert torch.equal(linear(torch.eye(linear.in_features)).T, expected), name
        own: list[Any] = [part.get_submodule(name) for part in parts]
        if all(type(linear) is BlockLinear for linear in own):
            columns = [linear(torch.eye(linear.in_features)).T for linear in own]
            assert torch.equal(torch.cat(columns, plan.shards[f"{name}.weight"].dim), expected), name


def test_only_cuda_in_16_bits_multiplies_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert multiplies_blocks(CUDA, torch.bfloat16) and not multiplies_blocks(CUDA, torch.float32)
    assert not multiplies_blocks(torch.device("cpu"), torch.bfloat16)
    floats = Blocks(torch.zeros(4, 96).to(torch.float8_e4m3fn), torch.ones(4, 3), None)
    assert fits_block_kernel(floats) and not fits_block_kernel(
        Blocks(torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 3), None)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not multiplies_blocks(CUDA, torch.float16)


def test_cards_that_convert_no_floats_dequantise_them(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = ScaledFloats(torch.zeros(64, 64).to(torch.float8_e4m3fn), torch.ones(2, 2), (32, 32))
    assert blocks_of(weight, has_fp8(CUDA)) is not None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert blocks_of(weight, has_fp8(CUDA)) is None


NEEDS_PRODUCTS = pytest.mark.skipif(
    not multiplies_floats(),
    reason="this torch has such products on CUDA only",
)


def make_floats(outputs: int, seed: int) -> Fp8Linear:
    torch.manual_seed(seed)
    values, scales = round_rows(torch.randn(outputs, 64))
    return Fp8Linear(values, scales, torch.randn(outputs).bfloat16())


class FloatGroup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = make_floats(32, 0)
        self.k_proj = make_floats(16, 1)
        self.v_proj = make_floats(16, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.q_proj(rows), self.k_proj(rows), self.v_proj(rows), self.k_proj(2 * rows)), -1)


@NEEDS_PRODUCTS
def test_products_are_those_of_the_rounded_numbers() -> None:
    linear, rows = make_floats(32, 0), torch.randn(2, 3, 64).bfloat16()
    values, scales = round_rows(rows.view(6, 64))
    assert linear.bias is not None
    weight = linear.weight.float() * linear.scales
    expected = (values.float() * scales) @ weight.T + linear.bias.float()
    torch.testing.assert_close(linear(rows).float(), expected.view(2, 3, 32), rtol=2**-7, atol=2**-5)


@NEEDS_PRODUCTS
def test_merged_products_of_8_bit_floats_equal_those_of_the_parts() -> None:
    model, rows = FloatGroup(), torch.randn(5, 64).bfloat16()
    expected = model(rows)
    fuse_linears(model)
    assert isinstance(model.q_proj, FusedLinearSlice) and model.q_proj.weight.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(model(rows), expected)


class Odd(nn.Module):
    """Calls q after k, and v with another input."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, size) for size in (6, 4, 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.k_proj(rows), self.q_proj(rows), self.v_proj(2 * rows), self.k_proj(rows)), -1)


def test_merged_products_of_plain_weights_equal_those_of_the_parts() -> None:
    model, inputs = Odd(), torch.randn(3, 8)
    expected = model(inputs)
    fuse_linears(model)
    assert isinstance(model.q_proj, FusedLinearSlice)
    for _ in range(2):
        torch.testing.assert_close(model(inputs), expected)


def test_changed_or_different_layers_are_not_merged() -> None:
    model = Odd()
    model.v_proj = nn.Linear(8, 4, bias=False)
    fuse_linears(model)
    assert type(model.q_proj) is nn.Linear
    model = Odd()
    model.v_proj.forward = model.v_proj.forward  # type: ignore[method-assign]
    fuse_linears(model)
    assert type(model.q_proj) is nn.Linear
