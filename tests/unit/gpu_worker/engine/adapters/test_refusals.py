"""Adapters that cannot be served are refused with the reason, and the engine goes on."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.engine.adapters import weights
from gpu_worker.engine.engine import Engine
from gpu_worker.protocol import AdapterAnswer, LoadAdapter
from tests.support.adapters.tiny_adapters import change_config, change_weights, save_adapter
from tests.support.engine import tiny_models
from tests.support.engine.tiny_engine import engine_of

SLOW = [f"(.*[a-z]){{{length}}}[A-Z]{number}" for length in range(3, 5) for number in range(1500)]
QUERY = "layers__0__self_attn__q_proj__lora_A__weight"
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "LOHA"}, "its peft_type is LOHA"),
    "DoRA": ({"use_dora": True}, "DoRA"),
    "whole layers": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    "another rank": ({"r": 3}, "the config says rank 3"),
    "a pattern that is none": ({"rank_pattern": {"(": 2}}, "no regular expression"),
    "a pattern without an end": ({"alpha_pattern": {"(.|.)*[A-Z]": 8}}, "take longer than"),
    "many slow patterns": ({"rank_pattern": dict.fromkeys(SLOW, 4)}, "take longer than"),
    "a deep pattern": ({"rank_pattern": {"(" * 1000 + ")" * 24: 2}}, "no regular expression"),
    "a long pattern": ({"rank_pattern": {"[a-z]" * 300: 2}}, "more than 1024 characters"),
    "too many patterns": ({"rank_pattern": {f"l{i}": 2 for i in range(4097)}}, "more than 4096 entries"),
    "an alpha that is no number": ({"alpha_pattern": {"q_proj": float("nan")}}, "an alpha of nan"),
    "an alpha that makes numbers too large": ({"lora_alpha": 1e300}, "scaled as float32"),
}
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "cannot be read"),
    "a file cut short": (lambda folder: cut(folder / "adapter_model.safetensors"), "is damaged"),
    "a file of noise": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"noise" * 99),
        "is damaged",
    ),
    "another layer": (lambda folder: move_to_another_layer(folder), "no such linear layer"),
    "a layer under two names": (lambda folder: name_twice(folder), "under two names"),
    "another width": (
        lambda folder: change_weights(folder, **{QUERY: torch.zeros(4, 63)}),
        "63 → 64 features, and the model has 64 → 64",
    ),
    "infinite numbers": (
        lambda folder: change_weights(folder, **{QUERY: torch.full((4, 64), torch.inf)}),
        "not finite",
    ),
    "a rank that is too large": (
        lambda folder: save_adapter(MODELS[0], folder, 1, r=65),
        "more than MAX_LORA_RANK (64)",
    ),
}
MODELS: list[Any] = []


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def name_twice(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    query = {name: tensor for name, tensor in tensors.items() if "layers.0.self_attn.q_proj" in name}
    save_file(
        tensors | {name.replace(".layers", ".language_model.layers"): one + 0 for name, one in query.items()},
        file,
    )


def move_to_another_layer(folder: Path) -> None:
    change_weights(folder, **{QUERY: None, "layers__0__self_attn__q_proj__lora_B__weight": None})
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    for half, shape in (("lora_A", (4, 64)), ("lora_B", (64, 4))):
        tensors[f"base_model.model.model.layers.9.self_attn.q_proj.{half}.weight"] = torch.zeros(shape)
    save_file(tensors, file)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("model")
    MODELS[:] = [tiny_models.save(folder, *tiny_models.FAMILIES["Llama"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "EXPRESSIONS_S", 0.2)
        yield engine_of(folder)


@pytest.fixture
def folder(engine: Engine, tmp_path: Path) -> Path:
    return save_adapter(MODELS[0], tmp_path / "adapter", 1)


def refusal(engine: Engine, folder: Path) -> str:
    answer = engine.obey(LoadAdapter("a", str(folder)))
    assert isinstance(answer, AdapterAnswer)
    return answer.cause


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_not_served_is_refused_by_name(engine: Engine, folder: Path, name: str) -> None:
    values, cause = CONFIGS[name]
    change_config(folder, **values)
    assert cause in refusal(engine, folder)


@pytest.mark.parametrize("name", DAMAGES)
def test_files_that_do_not_fit_are_refused(engine: Engine, folder: Path, name: str) -> None:
    damage, cause = DAMAGES[name]
    damage(folder)
    assert cause in refusal(engine, folder)
