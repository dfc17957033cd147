"""What an engine does on CUDA, with the CUDA parts replaced by ones for CPU."""

from pathlib import Path
from typing import Any

import pytest

from common.model_files import no_progress
from common.settings.settings import Settings
from gpu_worker.engine import engine as engine_module
from gpu_worker.engine import preparation
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model.load import nondeterministic_because
from gpu_worker.engine.parallel.communicator import SINGLE_RANK
from tests.support.engine import on_cuda, tiny_models
from tests.support.engine.tiny_engine import engine_of, play, prompts
from tests.support.engine.tiny_models import FAMILIES

CUDA_GRAPHS_OFF = Settings.read([], {"CUDA_GRAPHS": "0"})


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an engine does to speed up its steps."""
    done: list[str] = []

    def compile_layers(*arguments: Any) -> int:
        done.append("compile")
        return 0

    monkeypatch.setattr(preparation, "compile_layers", compile_layers)
    monkeypatch.setattr(engine_module, "stop_compiling", lambda: None)
    monkeypatch.setattr(engine_module, "make_capture", lambda device: on_cuda.again)
    return done


def engine_with_graphs(folder: Path) -> Engine:
    """An engine whose attention can be compiled and captured."""
    engine = engine_of(folder)
    engine.loaded.backend.compilable = True
    engine.loaded.backend.capturable = True
    engine.loaded.backend.plan_free = True
    return engine


@pytest.mark.parametrize("settings", [Settings(enforce_eager=True), CUDA_GRAPHS_OFF], ids=["eager", "TGI"])
def test_an_eager_engine_compiles_and_captures_nothing(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine = engine_with_graphs(tmp_path)
    fresh = dict(enumerate(prompts()))
    expected = play(engine, fresh)
    monkeypatch.setattr(engine, "capture", lambda *arguments: steps.append("capture"))
    engine.compile_and_capture(settings, no_progress)
    assert steps == [] and engine.graphs is None
    assert play(engine, fresh) == expected
    engine.compile_and_capture(Settings(), no_progress)
    assert steps == ["compile", "capture"]


def test_an_eager_engine_on_cuda_cannot_be_deterministic(tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine = engine_with_graphs(tmp_path)
    engine.loaded.device = on_cuda.torch.device("cuda")  # type: ignore[attr-defined]
    engine.loaded.adapters = None  # as on CUDA without LORA_ADAPTERS
    reason = nondeterministic_because(Settings(enforce_eager=True), engine.loaded, 0, SINGLE_RANK)
    assert "ENFORCE_EAGER" in reason
    assert nondeterministic_because(Settings(), engine.loaded, 0, SINGLE_RANK) == ""
