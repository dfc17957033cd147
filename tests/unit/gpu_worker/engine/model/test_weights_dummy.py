"""LOAD_FORMAT=dummy: an engine for a config without weights."""

import json
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from common.settings.settings import SettingError, Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model import weights as dummy
from gpu_worker.engine.model.families import register_family
from gpu_worker.engine.model.weights import meta_model
from gpu_worker.engine.parallel.shards import make_tp_plan
from gpu_worker.engine.parallel.tensor_parallel import equalize_replicas
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player

NEW_TOKENS = 12
PROMPTS = ([5, 6, 7], list(range(3, 40)))
ONE_OR_ZERO = re.compile(r"norm|bias$")
"""Of norms and biases, before any training."""
SETTINGS: dict[str, Any] = {
    "kv_cache_bytes": 2**22,
    "max_batch_prefill_tokens": 64,
    "block_size": 16,
    "threads": 1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without weights."""
    tiny_models.save(tmp_path / "whole", "Llama", tiny_models.LLAMA | {"vocab_size": 501})
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(tmp_path / "whole" / name, tmp_path)
    return tmp_path


def outputs_of(engine: Any) -> tuple[dict[int, list[int]], list[float]]:
    """New ids, and their log-probabilities."""
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)))
    ids = played.run(
        [played.start(row, prompt, NEW_TOKENS, ignore_eos=True) for row, prompt in enumerate(PROMPTS)]
    )
    return ids, [logprob for step in played.steps for *_, logprob in step.sampled]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_config_suffices_and_all_workers_make_the_same_weights(folder: Path, dtype: str) -> None:
    engines = [
        Engine(Settings(model_id=str(folder), load_format="dummy", dtype=dtype, **SETTINGS))  # type: ignore[arg-type]
        for _ in range(2)
    ]
    (ids, logprobs), again = (outputs_of(engine) for engine in engines)
    assert {parameter.dtype for parameter in engines[0].loaded.model.parameters()} == {getattr(torch, dtype)}
    assert [len(ids[row]) for row in range(len(PROMPTS))] == [NEW_TOKENS] * len(PROMPTS)
    assert all(math.isfinite(logprob) for logprob in logprobs)
    assert (ids, logprobs) == again


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_weight_is_initialised(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of what stood in the memory before."""
    name, sizes = tiny_models.FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**sizes)
    register_family(config.model_type)
    whole = meta_model(config, Settings())
    for allocate in (torch.empty_like, torch.empty):
        monkeypatch.setattr(torch, allocate.__name__, partial(spoiled, allocate))
    model = dummy.make_dummy_model(type(whole), config, torch.bfloat16, torch.device("cpu"), Settings())
    assert [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if not torch.isfinite(tensor).all()
    ] == []
    weights = {
        name: weight
        for name, weight in model.named_parameters()
        if weight.dim() > 1 and not ONE_OR_ZERO.search(name)
    }
    assert [name for name, weight in weights.items() if not 0 < weight.float().std() < 1] == []


def spoiled(allocate: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    tensor = allocate(*args, **options)
    return tensor.fill_(math.nan) if tensor.is_floating_point() and not tensor.is_meta else tensor


def test_ranks_use_the_first_ones_values() -> None:
    config = transformers.Qwen3MoeConfig(**tiny_models.FAMILIES["Qwen3-MoE"][1])
    whole = meta_model(config, Settings())
    plan, sent = make_tp_plan(whole, 2), list[torch.Tensor]()
    equalize_replicas(whole, plan, SimpleNamespace(broadcast_tensor=sent.append))  # type: ignore[arg-type]
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    shared = {name for name in names.values() if name not in plan.shards}
    assert len(sent) == len(shared) and "model.layers.0.mlp.gate.weight" in shared


def test_without_dummy_weights_are_required(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(
        SettingError, match=r"has no whole set of \.safetensors files .*LOAD_FORMAT=dummy"
    ) as caught:
        Engine(Settings(model_id=str(folder), **SETTINGS))
    assert caught.value.name == "model_id" and "\n" not in str(caught.value)


def test_a_quantised_model_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(SettingError, match=r"LOAD_FORMAT: dummy makes plain weights, but .* is quantised"):
        Engine(Settings(model_id=str(folder), load_format="dummy", **SETTINGS))
