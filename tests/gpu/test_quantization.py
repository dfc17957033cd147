"""Quantised models on CUDA: their layers multiply what the checkpoint has, compiled and in graphs; on CPU
torch does what the kernels do.
"""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from gpu_worker.engine.cuda.linear import FP8, FusedLinearSlice, QuantisedLinear
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model import quantized_linears
from tests.support.engine import quantized_models, tiny_models
from tests.support.engine.on_cuda import HEADS, distances, each, engine_on, needs_flash
from tests.support.engine.quantized_models import FORMATS, multiplies_floats
from tests.support.engine.tiny_engine import play, prompts
from tests.support.engine.tiny_models import LLAMA

WIDE = ("Llama", LLAMA | HEADS | {"hidden_size": 192})
"""Inputs of all layers are whole units of 4 bits."""
BLOCKS = ["awq", "gptq-desc_act", "w4a16-asymmetric", "w8a8-int8", "bitsandbytes-4", "fp8-blocks"]
FLOATS = ["w8a8-fp8", "fp8-tensor"]
WIDENED, ROUNDED = 0.4, 1.5
"""As MEAN in on_cuda.py, and where rows are rounded to 8 bits, too. On CPU they were below 0.2 and 1.0."""


@pytest.fixture(autouse=True)
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_models.FAMILIES, "Llama", WIDE)
    if request.node.callspec.params["device"] == "cpu":
        monkeypatch.setattr("gpu_worker.engine.engine.compile_layers", lambda *arguments: 0)
        monkeypatch.setattr(quantized_linears, "multiplies_blocks", lambda device, dtype: True)
        monkeypatch.setattr(quantized_linears, "has_fp8", lambda device: True)
        monkeypatch.setattr(quantized_linears, "multiplies_fp8", lambda device, dtype: True)


def are_floats(model: nn.Module) -> set[bool]:
    """Of linear layers but the head: whether 8-bit floats with a scale for each output are multiplied."""
    weights: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, QuantisedLinear) or (isinstance(module, FusedLinearSlice) and not module.number)
    ]
    return {linear.weight.dtype == FP8 and linear.scales.shape[1] == 1 for linear in weights}


def check_mean(engine: Engine, model: Any, limit: float) -> None:
    """Of all rows' distances from the likeliest tokens, batched and chunked."""
    fresh = dict(enumerate(prompts()))
    for prefill_tokens in (1000, 7):
        for row, ids in play(engine, fresh, prefill_tokens).items():
            found = distances(model, fresh[row], ids)
            assert found.mean() < limit, f"row {row}, {prefill_tokens} a step: {found.tolist()}"


@each("form", BLOCKS)
def test_blocks_give_the_ids_of_their_numbers(
    device: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_flash(device)
    model = quantized_models.save(tmp_path, *FORMATS[form])
    engine = engine_on(device, tmp_path, monkeypatch, dtype="bfloat16")
    assert engine.graphs and are_floats(engine.loaded.model) == {False}
    check_mean(engine, model, WIDENED)


@each("form", [*FLOATS, "plain"])
def test_8_bit_floats_give_ids_near_those_of_their_numbers(
    device: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also plain weights, rounded at load."""
    needs_flash(device)
    if device == "cpu" and not multiplies_floats():
        pytest.skip("this torch has such products on CUDA only")
    model = (
        tiny_models.save(tmp_path, *WIDE)
        if form == "plain"
        else quantized_models.save(tmp_path, *FORMATS[form])
    )
    quantize = {"quantize": "fp8"} if form == "plain" else {}
    engine = engine_on(device, tmp_path, monkeypatch, dtype="bfloat16", **quantize)
    assert engine.graphs and are_floats(engine.loaded.model) == {True}
    check_mean(engine, model, ROUNDED)
