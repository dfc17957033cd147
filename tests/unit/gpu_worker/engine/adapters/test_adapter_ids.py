"""Rows with LoRA adapters have the ids of PEFT's merged models, whatever rows are in a step beside them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.engine.engine import Engine
from tests.support.adapters import fake_kernels
from tests.support.adapters.playing import check_adapters, load_adapters
from tests.support.adapters.tiny_adapters import LINEARS, save_adapter
from tests.support.engine import tiny_models
from tests.support.engine.quantized_models import AWQ, GPTQ, awq, gptq
from tests.support.engine.quantized_models import save as save_quantised
from tests.support.engine.tiny_engine import engine_of

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "attention": {"target_modules": ["q_proj", "v_proj"], "r": 8},
    "stable": {"use_rslora": True, "r": 6, "target_modules": "all-linear"},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 5},
        "alpha_pattern": {"o_proj": 3, "^model.layers.0.mlp.down_proj": 20},
        "target_modules": r".*\.[02]\..*_proj|.*layers\.1\.mlp\.up_proj",
    },
    "vocabulary": {"target_modules": [*LINEARS, "embed_tokens", "lm_head"]},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("llama")
    return tiny_models.save(folder, *tiny_models.FAMILIES["Llama"]), folder


@pytest.fixture(scope="module")
def folders(llama: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_adapter(llama[0], tmp_path_factory.mktemp(name), seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }


def test_ids_of_rows_of_many_adapters_equal_those_of_merged_models(
    llama: tuple[Any, Path], folders: dict[str, Path]
) -> None:
    model, path = llama
    engine = engine_of(path)
    load_adapters(engine, folders)
    check_adapters(engine, model, folders, ["", *ADAPTERS])


@pytest.mark.slow
@pytest.mark.parametrize("by_kernels", [True, False])
def test_layers_that_are_captured_and_fused_as_on_cuda_give_the_same_ids(
    llama: tuple[Any, Path],
    folders: dict[str, Path],
    like_cuda: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    by_kernels: bool,
) -> None:
    """By kernels that read buffers of a fixed place, and by torch, one adapter after the other."""
    if by_kernels:
        fake_kernels.install(monkeypatch)
    model, path = llama
    engine = like_cuda(path)
    load_adapters(engine, folders)
    check_adapters(engine, model, folders, ["", "all", "vocabulary"])


@pytest.mark.slow
@pytest.mark.parametrize(("write", "config"), [(gptq(4), GPTQ), (awq, AWQ)], ids=["gptq", "awq"])
def test_an_adapter_of_a_quantised_model_is_added_to_its_products(
    write: Any, config: dict[str, Any], tmp_path: Path
) -> None:
    model = save_quantised(tmp_path / "model", write, config)
    folders = {"all": save_adapter(model, tmp_path / "all", 1)}
    engine = engine_of(tmp_path / "model")
    load_adapters(engine, folders)
    check_adapters(engine, model, folders, ["all"])
