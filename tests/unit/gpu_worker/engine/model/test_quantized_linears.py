"""QUANTIZE=fp8 rounds plain weights; the products of 8-bit floats give nearly the logits of their numbers.
Linear layers of a GPU: weights that stay in blocks, 8-bit floats, and layers with one input, merged.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from common.settings.settings import SettingError, Settings
from gpu_worker.engine.cuda import linear as block_linear
from gpu_worker.engine.cuda.linear import FP8, FusedLinearSlice, QuantisedLinear, fuse_linears, round_rows
from gpu_worker.engine.model import quantized_linears
from gpu_worker.engine.model.quantized_linears import (
    check_fp8,
    quantise_linears,
    quantised_weights,
    rounded_blocks,
)
from gpu_worker.engine.model.weights import ModelSource
from gpu_worker.engine.parallel.model_parallel import make_tp_plan
from gpu_worker.engine.quantization.blocks import Blocks
from tests.support.engine import fake_products, quantized_models, tiny_models
from tests.support.engine.quantized_models import FORMATS, multiplies_floats

NEEDS_PRODUCTS = pytest.mark.skipif(
    not multiplies_floats(),
    reason="this torch has such products on CUDA only",
)
IDS = torch.tensor([list(range(3, 40))])


CPU = torch.device("cpu")


def with_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU multiply 8-bit floats as a card does."""
    monkeypatch.setattr(quantized_linears, "has_fp8", lambda device: True)
    monkeypatch.setattr(quantized_linears, "multiplies_fp8", lambda device, dtype: True)


def linears_of(model: nn.Module, kind: type[nn.Module]) -> dict[str, Any]:
    return {name: child for name, child in model.named_modules() if type(child) is kind}


@NEEDS_PRODUCTS
@torch.inference_mode()
def test_products_of_8_bit_floats_are_near_those_of_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With q, k and v in one product; the head stays plain."""
    tiny_models.save(tmp_path, *tiny_models.FAMILIES["Llama"])
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    multiplied = copy.deepcopy(rounded)
    quantise_linears(rounded, rounded_blocks(rounded, "fp8", CPU), CPU)
    with_products(monkeypatch)
    quantise_linears(multiplied, rounded_blocks(multiplied, "fp8", CPU), CPU)
    assert [*linears_of(multiplied, nn.Linear)] == ["lm_head"]
    fuse_linears(multiplied)
    assert [*linears_of(multiplied, QuantisedLinear)] == [
        f"model.layers.{layer}.{name}" for layer in range(3) for name in ("self_attn.o_proj", "mlp.down_proj")
    ]
    assert similarity(multiplied, rounded) > 0.999


def check_numbers(
    folder: Path, dtype: torch.dtype, device: torch.device, numbers: Callable[[Any], torch.Tensor]
) -> tuple[nn.Module, nn.Module]:
    """The layers of a checkpoint have its numbers: whole, and the parts of two ranks. Returns the model with
    them, and the one of plain numbers.
    """
    plain: Any = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32)
    config, plan = AutoConfig.from_pretrained(folder), make_tp_plan(copy.deepcopy(plain), 2)
    config.quantization_config = json.loads((folder / "config.json").read_text())["quantization_config"]
    whole, *parts = (copy.deepcopy(plain).to(dtype) for _ in range(3))
    for number, model in enumerate((whole, *parts)):
        ranks: Any = SimpleNamespace(tp_rank=max(0, number - 1))
        source = ModelSource(folder, config, dtype, device, Settings(), ranks)
        quantise_linears(model, quantised_weights(model, source, plan.shards if number else {}), device)
    found = linears_of(whole, QuantisedLinear)
    assert len(found) == 21
    for name, linear in found.items():
        expected = plain.get_parameter(f"{name}.weight")
        assert torch.equal(numbers(linear), expected), name
        own: list[Any] = [part.get_submodule(name) for part in parts]
        if all(type(one) is QuantisedLinear for one in own):
            joined = torch.cat([numbers(one) for one in own], plan.shards[f"{name}.weight"].dim)
            assert torch.equal(joined, expected), name
    return whole, plain


@NEEDS_PRODUCTS
@torch.inference_mode()
@pytest.mark.parametrize("form", ["w8a8-fp8", "fp8-tensor"])
def test_a_checkpoints_own_floats_are_multiplied(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized_models.save(tmp_path, *FORMATS[form])
    with_products(monkeypatch)
    found = check_numbers(tmp_path, torch.float32, CPU, lambda linear: linear.weight.float() * linear.scales)
    assert similarity(*found) > 0.999


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with kernels that torch computes."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(block_linear, "find_spec", lambda name: name)
    fake_products.install(monkeypatch)


@pytest.mark.usefixtures("card")
@torch.inference_mode()
@pytest.mark.parametrize("form", ["awq", "gptq-desc_act", "bitsandbytes-4-nested", "fp8-blocks"])
def test_a_checkpoints_own_numbers_are_multiplied(form: str, tmp_path: Path) -> None:
    """In float32 exactly."""
    quantized_models.save(tmp_path, *FORMATS[form])
    cuda = torch.device("cuda", 0)
    check_numbers(tmp_path, torch.float16, cuda, lambda linear: linear(torch.eye(linear.in_features)).T)


def similarity(multiplied: nn.Module, plain: nn.Module) -> float:
    """Of the logits of two models in float32; the rows of the other's linear layers are rounded, too."""
    other = copy.deepcopy(plain)
    for name, linear in linears_of(other, nn.Linear).items():
        if name != "lm_head":
            linear.register_forward_pre_hook(round_input)
    logits, expected = (model(IDS).logits.float() for model in (multiplied, other))
    return float(torch.cosine_similarity(logits, expected, -1).min())


def round_input(module: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    values, scales = round_rows(inputs[0])
    return (values.float() * scales).to(inputs[0].dtype)


def test_cards_and_types_without_such_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaConfig()
    cuda, settings = torch.device("cuda", 0), Settings(quantize="fp8", dtype="float16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(SettingError, match=r"^QUANTIZE: fp8 needs .* capability 8\.9, and this has 8\.6"):
        check_fp8(plain, settings, cuda, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(SettingError, match=r"^QUANTIZE: fp8 gives bfloat16, and DTYPE is float16"):
        check_fp8(plain, settings, cuda, torch.float16)
    check_fp8(plain, settings, cuda, torch.bfloat16)
    check_fp8(plain, settings, torch.device("cpu"), torch.float32)


@torch.inference_mode()
def test_routers_stay_plain_also_within_a_module_of_their_own(tmp_path: Path) -> None:
    name, sizes = tiny_models.FAMILIES["HunYuan-MoE"]
    model = tiny_models.save(tmp_path, name, sizes | {"num_experts": 16})
    before = {name: weight.clone() for name, weight in model.named_parameters() if "layers.0" in name}
    quantise_linears(model, rounded_blocks(model, "fp8", CPU), CPU)
    same = {name for name, weight in before.items() if torch.equal(weight, model.get_parameter(name))}
    assert "model.layers.0.mlp.gate.wg.weight" in same
    assert "model.layers.0.self_attn.q_proj.weight" not in same


# --- layers with one input ----------------------------------------------------------------------------------


def make(outputs: int, order: torch.Tensor | None = None) -> QuantisedLinear:
    quants = torch.randint(0, 16, (outputs, 128)).to(torch.uint8)
    scales, offsets = torch.rand(outputs, 4).half(), torch.randn(outputs, 4).half()
    return QuantisedLinear(Blocks(quants, scales, offsets, order=order), torch.randn(outputs))


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


@pytest.mark.usefixtures("card")
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
