"""Plain weights become those of bitsandbytes and EETQ at load, with the numbers that these define."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.quantization.at_load import FP4, NF4, ROUNDINGS
from gpu_worker.engine.quantization.blocks import Blocks
from gpu_worker.engine.quantization.weight import widen
from tests.support.engine import quantized_models, tiny_models
from tests.support.engine.quantized_models import keeps_blocks
from tests.support.engine.tiny_engine import NEW_TOKENS, play

ROWS = {0: [5, 6, 7], 1: list(range(3, 40))}
SETTINGS: dict[str, Any] = {"kv_cache_bytes": 2**23, "max_batch_prefill_tokens": 64, "threads": 1}


def float64_nearest(weight: torch.Tensor, codes: tuple[float, ...]) -> torch.Tensor:
    """Each weight of 64 in turn as the nearest code, times their largest."""
    parts = weight.flatten().double().view(-1, 64)
    largest = parts.abs().amax(1, keepdim=True)
    table = torch.tensor(codes).double()
    found = ((parts / largest)[..., None] - table).abs().argmin(-1)
    return (table[found] * largest).view(weight.shape)


@pytest.mark.parametrize("shape", [(16, 128), (48, 96)], ids=["blocks", "across rows"])
@pytest.mark.parametrize("method", ["nf4", "fp4"])
def test_four_bits_are_the_nearest_codes(method: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    codes = NF4 if method == "nf4" else (*FP4, *(-code for code in FP4))
    own = ROUNDINGS[f"bitsandbytes-{method}"](weight)
    assert isinstance(own, Blocks) is (shape[1] % 64 == 0)
    assert torch.allclose(widen(own).double(), float64_nearest(weight, codes), rtol=1e-6)


@pytest.mark.parametrize(("method", "whole"), [("bitsandbytes", 127), ("eetq", 128)])
def test_eight_bits_have_a_scale_for_each_output(method: str, whole: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 96).half()
    weight[3] = 0
    largest = weight.float().abs().amax(1, keepdim=True)
    scales = largest / whole if method == "bitsandbytes" else (largest / whole).half().float()
    quants = (weight.float() / (largest / whole).clamp(min=1e-9)).round().clamp(-128, 127)
    own = ROUNDINGS[method](weight)
    assert isinstance(own, Blocks) and own.quants.dtype == torch.int8
    assert torch.allclose(widen(own), quants * scales, rtol=1e-6)


def rounded(model: Any, method: str) -> Any:
    """A copy of a model with the numbers that its linear layers have after loading."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, child in model.named_modules():
            if type(child) is nn.Linear and name != "lm_head":
                child.weight.copy_(widen(ROUNDINGS[method](child.weight)))
    return model


@pytest.mark.parametrize("family", ["Llama", pytest.param("Llama-tied", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ROUNDINGS)
def test_ids_are_those_of_the_rounded_numbers(method: str, family: str, tmp_path: Path) -> None:
    plain = tiny_models.save(tmp_path, *tiny_models.FAMILIES[family])
    expected = {
        row: tiny_models.generate(rounded(plain, method), ids, NEW_TOKENS) for row, ids in ROWS.items()
    }
    options: dict[str, Any] = {"quantize": method, "dtype": "float32", **SETTINGS}
    engine = Engine(Settings(model_id=str(tmp_path), **options))
    assert play(engine, ROWS) == expected
    assert expected != {row: tiny_models.generate(plain, ids, NEW_TOKENS) for row, ids in ROWS.items()}


@pytest.mark.parametrize("method", ROUNDINGS)
def test_blocks_have_the_bits_of_the_rounded_numbers(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, with no plain weights beside the blocks."""
    quantized_models.keep_blocks_only(monkeypatch)
    tiny_models.save(tmp_path / "plain", *tiny_models.FAMILIES["Llama"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    rounded(model, method).save_pretrained(tmp_path / "rounded")
    (tmp_path / "rounded" / "tokenizer.json").write_bytes(
        (tmp_path / "plain" / "tokenizer.json").read_bytes()
    )
    found = []
    for folder, asked in (("plain", method), ("rounded", None)):
        settings = Settings(model_id=str(tmp_path / folder), quantize=asked, dtype="bfloat16", **SETTINGS)  # type: ignore[arg-type]
        engine = Engine(settings)
        found.append(play(engine, ROWS))
        layer = engine.loaded.model.model.layers[0]
        linears = (layer.self_attn.q_proj, layer.mlp.down_proj)
        assert not keeps_blocks() or all((it.blocks is not None) is (asked is not None) for it in linears)
    assert found[0] == found[1]
