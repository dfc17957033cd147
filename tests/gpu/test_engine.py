"""The engine on CUDA: its ids, its captured and compiled steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common import model_files
from common.settings.settings import SettingError
from gpu_worker.engine.cuda.graphs import PLAIN, CudaGraphs, graph_sizes, layers_of
from gpu_worker.engine.cuda.linear import FusedLinearSlice
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model.warmup import max_captured_tokens
from tests.support.engine import reference, tiny_models
from tests.support.engine.on_cuda import (
    ANYWHERE,
    FLASH_FAMILIES,
    ON_GPUS,
    SETTINGS,
    check_near,
    each,
    engine_on,
    needs_flash,
    noted,
)
from tests.support.engine.tiny_engine import NEW_TOKENS, answers, check_ids, play, prompts
from tests.support.engine.tiny_models import FAMILIES
from tests.support.prompts import FEW, PROMPTS

FLASH = ["Llama", *(name for name in FLASH_FAMILIES if name != "Llama")]


@ON_GPUS
@pytest.mark.parametrize(
    "family", ["Llama-dynamic", "Mistral", "Gemma2", "Qwen3-MoE", "GPT2", "DeepSeek-V3", "gpt-oss"]
)
def test_float32_of_other_families_gives_the_ids_of_generate(
    device: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.save(tmp_path, *FAMILIES[family])
    expected = answers(model)
    check_ids(engine_on(device, tmp_path, monkeypatch, dtype="float32"), expected)


def check_in_every_way(engine: Engine, model: Any, fresh: dict[int, list[int]]) -> None:
    for row, prompt in fresh.items():
        check_near(model, {row: prompt}, play(engine, {row: prompt}), "alone")
    batched = play(engine, fresh)
    check_near(model, fresh, batched, "batched")
    check_near(model, fresh, play(engine, fresh, prefill_tokens=7), "chunked")
    shown = {row: ids[:9] for row, ids in batched.items()}
    begun = {row: prompt + shown[row] for row, prompt in fresh.items()}
    check_near(model, begun, play(engine, fresh, shown=shown), "resumed")


@each("family", FLASH, slow=[name for name in FLASH if name not in ("Llama", "gpt-oss")])
def test_bfloat16_ids_are_near_those_of_float32(device: str, family: str, flash: Callable[..., Any]) -> None:
    model, engine = flash(FLASH_FAMILIES[family])
    assert engine.graphs and engine.loaded.backend.plan_free == (family not in ("Gemma2", "DeepSeek-V3")), (
        "a softcap needs plans, and so do latents"
    )
    check_in_every_way(engine, model, dict(enumerate(prompts())))


@ON_GPUS
def test_smollm2_in_bfloat16_is_near_float32(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_flash(device)
    try:
        path = model_files.resolve("smollm2", dtype="bfloat16")
    except SettingError as error:
        pytest.skip(str(error))
    settings = {"dtype": "bfloat16", "kv_cache_bytes": 2**28, "max_batch_size": len(FEW)}
    engine = engine_on(device, "smollm2", monkeypatch, **settings)
    fresh = dict(enumerate(reference.prompt_ids([PROMPTS[place] for place in FEW])))
    check_in_every_way(engine, reference.load(path), fresh)


@ANYWHERE
def test_steps_of_few_tokens_come_from_graphs(device: str, flash: Callable[..., Any]) -> None:
    """All of them, from the smallest that holds their rows; and without them the tokens are as good."""
    (model, engine), fresh = flash(), dict(enumerate(prompts()))
    assert isinstance(engine.graphs, CudaGraphs)
    largest = max_captured_tokens(SETTINGS["max_batch_size"])
    assert [size for size, own in engine.graphs.graphs if own == PLAIN] == graph_sizes(
        SETTINGS["max_batch_size"], largest
    )
    for num_rows in (1, 2, 3, 4):
        some = {row: fresh[row] for row in range(num_rows)}
        with noted(engine) as (computed, replayed):
            check_near(model, some, play(engine, some), f"{num_rows} rows from graphs")
        assert replayed == [num_rows] * len(computed) and sum(computed) >= NEW_TOKENS - 1
        assert not all(computed), "prompts come from graphs, too"
    with noted(engine) as (computed, replayed):
        check_near(model, fresh, play(engine, fresh, prefill_tokens=7), "chunked")
    assert len(replayed) == len(computed) > sum(computed)
    engine.graphs = None
    check_near(model, fresh, play(engine, fresh), "without graphs")


@ANYWHERE
def test_layers_are_compiled_before_the_first_row(device: str, flash: Callable[..., Any]) -> None:
    """And never while they wait: with this stance torch raises where it would compile, or run uncompiled."""
    (model, engine), fresh = flash(), dict(enumerate(prompts()))
    loaded, counters = engine.loaded, torch._dynamo.utils.counters
    layers = layers_of(loaded.model, loaded.layers)
    assert len(layers) == 3 and all(layer._compiled_call_impl for layer in layers)
    assert all(isinstance(attention.q_proj, FusedLinearSlice) for attention in loaded.layers)
    compiled = counters["stats"]["unique_graphs"]
    assert 1 <= compiled <= 3 and not counters["graph_break"]
    torch.compiler.set_stance("fail_on_recompile")
    for graphs in (engine.graphs, None):
        engine.graphs = graphs
        check_near(model, fresh, play(engine, fresh), "batched")
        check_near(model, fresh, play(engine, fresh, prefill_tokens=7), "chunked")
    assert counters["stats"]["unique_graphs"] == compiled
