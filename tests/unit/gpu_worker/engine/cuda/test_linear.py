"""Linear layers of a GPU: weights that stay in blocks, 8-bit floats, and layers with one input, merged."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from common.settings.settings import Settings
from gpu_worker.engine.cuda import linear as block_linear
from gpu_worker.engine.cuda.linear import FP8, FusedLinearSlice, QuantisedLinear, fuse_linears, round_rows
from gpu_worker.engine.model.quantized_linears import quantise_linears, quantised_weights
from gpu_worker.engine.model.weights import ModelSource
from gpu_worker.engine.parallel.stages import make_tp_plan
from gpu_worker.engine.quantization.blocks import Blocks
from tests.support.engine import fake_products, quantized_models
from tests.support.engine.quantized_models import FORMATS, multiplies_floats

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with kernels that torch computes."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(block_linear, "find_spec", lambda name: name)
    fake_products.install(monkeypatch)


def make(outputs: int, order: torch.Tensor | None = None) -> QuantisedLinear:
    quants = torch.randint(0, 16, (outputs, 128)).to(torch.uint8)
    scales, offsets = torch.rand(outputs, 4).half(), torch.randn(outputs, 4).half()
    return QuantisedLinear(Blocks(quants, scales, offsets, order=order), torch.randn(outputs))


@torch.inference_mode()
@pytest.mark.parametrize("form", ["awq", "gptq-desc_act", "bitsandbytes-4-nested", "fp8-blocks"])
def test_a_checkpoints_own_numbers_are_multiplied(form: str, tmp_path: Path) -> None:
    """In float32 exactly; whole, and the parts of two ranks."""
    quantized_models.save(tmp_path, *FORMATS[form])
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    config = AutoConfig.from_pretrained(tmp_path)
    config.quantization_config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    plan, shards = make_tp_plan(plain, 2), [{}, *[make_tp_plan(plain, 2).shards] * 2]
    whole, *parts = (copy.deepcopy(plain).half() for _ in shards)
    for number, model in enumerate((whole, *parts)):
        ranks: Any = SimpleNamespace(tp_rank=max(0, number - 1))
        source = ModelSource(tmp_path, config, torch.float16, CUDA, Settings(), ranks)
        quantise_linears(model, quantised_weights(model, source, shards[number]), CUDA)
    found = {name: child for name, child in whole.named_modules() if type(child) is QuantisedLinear}
    assert len(found) == 21
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    for name, linear in found.items():
        expected = exact.get_parameter(f"{name}.weight")
        assert torch.equal(linear(torch.eye(linear.in_features)).T, expected), name
        own: list[Any] = [part.get_submodule(name) for part in parts]
        if all(type(linear) is QuantisedLinear for linear in own):
            columns = [linear(torch.eye(linear.in_features)).T for linear in own]
            assert torch.equal(torch.cat(columns, plan.shards[f"{name}.weight"].dim), expected), name


NEEDS_PRODUCTS = pytest.mark.skipif(
    not multiplies_floats(),
    reason="this torch has such products on CUDA only",
)


def make_floats(outputs: int, seed: int) -> QuantisedLinear:
    torch.manual_seed(seed)
    values, scales = round_rows(torch.randn(outputs, 64))
    return QuantisedLinear(Blocks(values, scales, None), torch.randn(outputs).bfloat16())


@NEEDS_PRODUCTS
def test_products_are_those_of_the_rounded_numbers() -> None:
    linear, rows = make_floats(32, 0), torch.randn(2, 3, 64).bfloat16()
    values, scales = round_rows(rows.view(6, 64))
    assert linear.bias is not None
    weight = linear.weight.float() * linear.scales
    expected = (values.float() * scales) @ weight.T + linear.bias.float()
    torch.testing.assert_close(linear(rows).float(), expected.view(2, 3, 32), rtol=2**-7, atol=2**-5)


class Group(nn.Module):
    """Calls k before q, and once more with another input."""

    def __init__(self, *linears: nn.Module) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = linears

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.k_proj(rows), self.q_proj(rows), self.v_proj(rows), self.k_proj(2 * rows)), -1)


def blocks_group(*seeds: int) -> Group:
    orders = [torch.randperm(128, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return Group(*map(make, (32, 16, 16), orders))


def plain_group(**last: bool) -> Group:
    return Group(nn.Linear(64, 6), nn.Linear(64, 4), nn.Linear(64, 4, **last))


def changed_group() -> Group:
    group = plain_group()
    group.v_proj.forward = group.v_proj.forward
    return group


@torch.inference_mode()
@pytest.mark.parametrize(
    ("make_group", "merged"),
    [
        (lambda: blocks_group(0, 0, 0), True),
        (lambda: blocks_group(0, 1, 0), False),  # inputs lie in different orders
        pytest.param(lambda: Group(*map(make_floats, (32, 16, 16), range(3))), True, marks=NEEDS_PRODUCTS),
        (plain_group, True),
        (lambda: plain_group(bias=False), False),
        (changed_group, False),
    ],
)
def test_merged_products_equal_those_of_the_parts(make_group: Callable[[], Group], merged: bool) -> None:
    model = make_group()
    rows = torch.randn(5, model.q_proj.in_features)  # type: ignore[call-overload]
    rows = rows.bfloat16() if model.q_proj.weight.dtype == FP8 else rows
    expected, kind = model(rows), type(model.q_proj)
    dtype = model.q_proj.weight.dtype
    fuse_linears(model)
    assert type(model.q_proj) is (FusedLinearSlice if merged else kind) and model.q_proj.weight.dtype == dtype
    for _ in range(2):
        torch.testing.assert_close(model(rows), expected)
