"""QUANTIZE=fp8 rounds plain weights; the products of 8-bit floats give nearly the logits of their numbers."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from common.settings.settings import SettingError, Settings
from gpu_worker.engine.cuda.linear import QuantisedLinear, fuse_linears, round_rows
from gpu_worker.engine.model import quantized_linears
from gpu_worker.engine.model.quantized_linears import (
    check_fp8,
    quantise_linears,
    quantised_weights,
    rounded_blocks,
)
from gpu_worker.engine.model.weights import ModelSource
from gpu_worker.engine.parallel.communicator import SINGLE_RANK
from gpu_worker.engine.parallel.stages import make_tp_plan
from tests.support.engine import quantized_models, tiny_models
from tests.support.engine.quantized_models import FORMATS, multiplies_floats
from tests.support.engine.tiny_engine import NEW_TOKENS, engine_of, play

NEEDS_PRODUCTS = pytest.mark.skipif(
    not multiplies_floats(),
    reason="this torch has such products on CUDA only",
)
ROWS = {0: [5, 6, 7], 1: list(range(3, 40))}
IDS = torch.tensor([list(range(3, 40))])


CPU = torch.device("cpu")


def with_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU multiply 8-bit floats as a card does."""
    monkeypatch.setattr(quantized_linears, "has_fp8", lambda device: True)
    monkeypatch.setattr(quantized_linears, "multiplies_fp8", lambda device, dtype: True)


def linears_of(model: nn.Module, kind: type[nn.Module]) -> dict[str, Any]:
    return {name: child for name, child in model.named_modules() if type(child) is kind}


def test_plain_weights_are_rounded_at_load(tmp_path: Path) -> None:
    reference = tiny_models.save(tmp_path, *tiny_models.FAMILIES["Mixtral"])
    plain = {row: tiny_models.generate(reference, ids, NEW_TOKENS) for row, ids in ROWS.items()}
    with torch.no_grad():
        for name, linear in linears_of(reference, nn.Linear).items():
            if "proj" in name:
                values, scales = round_rows(linear.weight)
                linear.weight.copy_(values.float() * scales)
    engine = engine_of(tmp_path, quantize="fp8")
    expected = {row: tiny_models.generate(reference, ids, NEW_TOKENS) for row, ids in ROWS.items()}
    assert play(engine, ROWS) == expected != plain


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


@NEEDS_PRODUCTS
@torch.inference_mode()
@pytest.mark.parametrize("form", ["w8a8-fp8", "fp8-tensor"])
def test_a_checkpoints_own_floats_are_multiplied(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and the parts of two ranks."""
    quantized_models.save(tmp_path, *FORMATS[form])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    config, model = AutoConfig.from_pretrained(tmp_path), copy.deepcopy(plain)
    config.quantization_config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    with_products(monkeypatch)
    source = ModelSource(tmp_path, config, torch.float32, CPU, Settings(), SINGLE_RANK)
    quantise_linears(model, quantised_weights(model, source, {}), CPU)
    found = linears_of(model, QuantisedLinear)
    assert len(found) == 21
    for name, linear in found.items():
        numbers = linear.weight.float() * linear.scales
        assert torch.equal(numbers, plain.get_parameter(f"{name}.weight")), name
    assert similarity(model, plain) > 0.999
    plan, parts = make_tp_plan(plain, 2), [copy.deepcopy(plain) for _ in range(2)]
    for rank, part in enumerate(parts):
        ranks: Any = SimpleNamespace(tp_rank=rank)
        own = replace(source, communicator=ranks)
        quantise_linears(part, quantised_weights(part, own, plan.shards), CPU)
    for name in ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"):
        found_parts: list[Any] = [part.get_submodule(name) for part in parts]
        numbers = torch.cat(
            [linear.weight.float() * linear.scales for linear in found_parts],
            plan.shards[f"{name}.weight"].dim,
        )
        assert torch.equal(numbers, plain.get_parameter(f"{name}.weight")), name


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


def test_a_model_without_layers_to_round_is_refused(tmp_path: Path) -> None:
    """GPT-2's are of transformers' own kind."""
    tiny_models.save(tmp_path, *tiny_models.FAMILIES["GPT2"])
    with pytest.raises(SettingError, match=r"^QUANTIZE: fp8, but GPT2LMHeadModel has no linear layers"):
        engine_of(tmp_path, quantize="fp8")
