"""Which layers are fused into one native call, and that a row's bits do not depend on its batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpu_worker.engine.cpu import fused_layer, native
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model import load
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.tiny_engine import engine_of, prompts
from tests.support.engine.tiny_models import FAMILIES

pytestmark = pytest.mark.usefixtures("library")


def num_fused(monkeypatch: pytest.MonkeyPatch, folder: Path, family: str, **sizes: float) -> int:
    if not native.library().tf_multiplies(native.TYPE_CODES[torch.float32]):  # type: ignore[union-attr]
        pytest.skip("torch's products are used on this processor")
    counts: list[int] = []

    def fuse_layers(*arguments: Any) -> int:
        counts.append(fused_layer.fuse_layers(*arguments))
        return counts[-1]

    monkeypatch.setattr(load, "fuse_layers", fuse_layers)
    tiny_models.save(folder, FAMILIES[family][0], FAMILIES[family][1] | sizes)
    engine_of(folder)
    return counts[0]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("Llama", 3),
        ("Llama-dynamic", 3),
        ("Mistral", 3),
        ("Qwen2", 3),
        ("Qwen3", 3),
        ("SmolLM3", 3),
        ("Gemma2", 0),
        ("OLMo2", 0),
        ("Ministral3", 0),
    ],
)
def test_layers_are_fused(
    family: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_fused(monkeypatch, tmp_path, family) == expected


def test_layers_that_read_positions_are_not_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However near they come on the trial inputs."""
    monkeypatch.setattr(fused_layer, "is_close", lambda *tensors: True)
    assert num_fused(monkeypatch, tmp_path / "far", "Ministral3") == 0
    assert num_fused(monkeypatch, tmp_path / "plain", "Llama") == 3


def test_layers_with_scaled_residuals_are_not_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_fused(monkeypatch, tmp_path, "Granite", residual_multiplier=0.95) == 0


def test_layers_with_other_code_are_not_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same parts, put together in another way."""
    import transformers.models.llama.modeling_llama as llama

    class Louder(llama.LlamaMLP):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return super().forward(states) * 1.01  # type: ignore[no-any-return, no-untyped-call]

    monkeypatch.setattr(llama, "LlamaMLP", Louder)
    assert num_fused(monkeypatch, tmp_path, "Llama") == 0


@pytest.mark.parametrize(("between", "joined"), [(1, True), (2, False)])
def test_layers_are_joined_where_nothing_is_between(
    between: int, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nn.Identity(), nn.Identity()
    fused = {first: lambda states: states * 3, second: lambda states: states + 5}
    for layer, forward in fused.items():
        layer.forward = forward  # type: ignore[method-assign]
    monkeypatch.setattr(
        fused_layer.FusedLayers, "joined", lambda parts: lambda states: parts[1](parts[0](states))
    )
    fused_layer.join_layers(fused, lambda: second(first(torch.ones(2)) * between))  # type: ignore[arg-type]
    assert (second.forward is fused_layer.pass_through) == joined == (first.forward is not fused[first])  # type: ignore[comparison-overlap]


def logprobs(engine: Engine, prefixes: dict[int, list[int]], prefill_tokens: int) -> dict[int, list[float]]:
    played = Player(
        engine, list(range(1, engine.ready.num_blocks + 1)), prefill_tokens, until=engine.rows.step
    )
    played.run([played.start(row, ids, 20, ignore_eos=True) for row, ids in prefixes.items()])
    found: dict[int, list[float]] = {row: [] for row in prefixes}
    for step in played.steps:
        for row, _, _, logprob in step.sampled:
            found[row].append(logprob)
    return found


def test_logprobs_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """Alone, with others, in chunks."""
    tiny_models.save(tmp_path, *FAMILIES["Mistral"])
    engine, rows_of = engine_of(tmp_path), dict(enumerate(prompts()))
    together = logprobs(engine, rows_of, 1000)
    assert logprobs(engine, rows_of, 7) == together
    assert {row: logprobs(engine, {row: prompt}, 1000)[row] for row, prompt in rows_of.items()} == together
