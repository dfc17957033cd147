"""Captured and compiled steps, on CPU: FlashInfer's attention is computed by torch, and a graph is captured
by calling again.
"""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.messages.request import LogitsParams
from common.model_files import no_progress
from common.settings.settings import SettingError, Settings
from gpu_worker.engine import engine as engine_module
from gpu_worker.engine.cuda import graphs as compiling
from gpu_worker.engine.cuda.graphs import PLAIN, SPLIT, CudaGraphs, run_without_sync
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model import warmup
from gpu_worker.engine.model.warmup import max_captured_tokens
from tests.support.engine import on_cuda, tiny_models
from tests.support.engine.batch_player import player
from tests.support.engine.fake_flashinfer import install
from tests.support.engine.on_cuda import noted
from tests.support.engine.tiny_engine import NEW_TOKENS, answers, check_ids, engine_of, play, prompts
from tests.support.engine.tiny_models import FAMILIES
from tests.support.parameters.slow_but import slow_but

if not install():
    pytest.skip("where there is a GPU, the tests marked gpu try the real parts", allow_module_level=True)
from gpu_worker.engine.attention.flashinfer import FlashInferBackend

AMPERE, HOPPER = 8, 9


@pytest.mark.parametrize(
    ("family", "generation"),
    slow_but(
        [("gpt-oss", AMPERE)],
        [("gpt-oss", AMPERE), *((name, HOPPER) for name in ("Phi3-longrope", "Qwen3-MoE", "MiniCPM3"))],
    ),
)
def test_ids_are_those_of_generate(
    family: str, generation: int, tmp_path: Path, like_cuda: Callable[..., Engine]
) -> None:
    """Steps of one to three rows that decode come from graphs, one of which is never full; others do not."""
    model = tiny_models.save(tmp_path, *FAMILIES[family])
    expected = answers(model)
    engine = like_cuda(tmp_path, generation=generation)
    assert engine.graphs
    check_ids(engine, expected)


def test_steps_of_few_tokens_come_from_graphs(tmp_path: Path, like_cuda: Callable[[Path], Engine]) -> None:
    """Prompts, too: whole, and in chunks beside rows that decode."""
    model = tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine, seen = like_cuda(tmp_path), list[int]()
    assert isinstance(engine.graphs, CudaGraphs)
    graphs = engine.graphs.graphs
    for key, run in graphs.items():
        graphs[key] = lambda run=run, key=key: (seen.append(key[0]), run())  # type: ignore[assignment,misc,func-returns-value]
    some = dict(enumerate(prompts()[:2]))
    expected = answers(model, some)
    assert play(engine, some) == expected
    sizes = [size for size, variant in graphs if variant == PLAIN]
    assert sizes == [1, 2, 3, 6, 12, 24, 48, 96, 160, 224, 288, 304]
    whole = sum(map(len, some.values()))
    assert seen == [next(size for size in sizes if size >= whole), *[2] * (NEW_TOKENS - 1)]
    with noted(engine) as (computed, replayed):
        assert play(engine, some, prefill_tokens=7) == expected
    assert len(replayed) == len(computed) > sum(computed)


def test_logits_that_a_graph_wrote_are_copied_before_the_next_step(
    tmp_path: Path, like_cuda: Callable[[Path], Engine]
) -> None:
    """All graphs write into one buffer, and the next step is launched before this one is read."""
    model = tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine, ids = like_cuda(tmp_path), prompts()[1]
    engine.runs_ahead = True
    played = player(engine)
    span = LogitsParams(False, True, "float32", 1)
    played.run([played.start(0, ids, NEW_TOKENS, ignore_eos=True, logits=span)])
    with torch.inference_mode():
        expected = model(torch.tensor([ids + played.ids[0]])).logits[0, len(ids) - 1 : -1]
    found = [torch.frombuffer(bytearray(values), dtype=torch.float32) for values in played.logits[0].values()]
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-4, atol=1e-4)


def test_steps_that_wait_for_the_device_are_not_captured(
    tmp_path: Path,
    like_cuda: Callable[[Path], Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Torch raises where it would wait, before anything is captured."""
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine, fresh, modes = like_cuda(tmp_path), dict(enumerate(prompts())), list[str]()
    expected, engine.graphs = play(engine, fresh), None

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        def wait() -> None:
            run()
            assert modes == ["error"]
            raise RuntimeError("called a synchronizing CUDA operation\nand so on")

        run_without_sync(wait)
        return run

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(engine_module, "make_capture", lambda device: capture)
    engine.settings = Settings(max_batch_size=3)
    engine.try_to_capture(no_progress)
    assert (
        engine.graphs is None
        and "captured: called a synchronizing CUDA operation;" in caplog.text
        and play(engine, fresh) == expected
    )
    assert modes == ["error", "default"]
    modes.clear()
    engine.settings = Settings(deterministic=True)
    with pytest.raises(SettingError, match="cannot be captured"):
        engine.try_to_capture(no_progress)


@pytest.mark.slow
def test_a_long_row_is_split_in_a_graph_of_its_own(
    tmp_path: Path, like_cuda: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside shorter ones; they have captured steps of few sizes, and their ids stay the same."""
    model, seen = tiny_models.save(tmp_path, *FAMILIES["Llama"]), list[tuple[str, int]]()
    monkeypatch.setattr(FlashInferBackend, "splits_rows", lambda backend, lengths: (lengths > 50).any())
    engine, fresh = like_cuda(tmp_path), {0: list(range(3, 60)), 1: [5, 6], 2: [7, 8, 9]}
    graphs = engine.graphs
    assert graphs and [size for size, own in graphs.graphs if own == SPLIT] == [1, 2, max_captured_tokens(3)]

    def note(kind: str, size: int, run: Callable[[], None]) -> Callable[[], None]:
        def noted() -> None:
            seen.append((kind, size))
            run()

        return noted

    for (size, variant), run in graphs.graphs.items():
        graphs.graphs[size, variant] = note(variant, size, run)
    for some in ([0, 1], [1, 2]):
        rows = {row: fresh[row] for row in some}
        expected = answers(model, rows)
        assert play(engine, rows) == expected
    decoded = [step for step in seen if step[1] == 2]  # the others computed prompts
    assert decoded == [(SPLIT, 2)] * (NEW_TOKENS - 1) + [(PLAIN, 2)] * (NEW_TOKENS - 1)


def test_what_torch_compiles_is_kept_where_nobody_else_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself torch takes a folder in /tmp whose name anybody can guess."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiling.compiled_folder() == tmp_path / "tokenfleet" / "inductor"
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = compiling.compiled_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and not [*folder.iterdir()]
    folder.rmdir()


CUDA_GRAPHS_OFF = Settings.read([], {"CUDA_GRAPHS": "0"})


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an engine does to speed up its steps."""
    done: list[str] = []

    def compile_layers(*arguments: Any) -> int:
        done.append("compile")
        return 0

    monkeypatch.setattr(engine_module, "compile_layers", compile_layers)
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
def test_an_eager_engine_runs_all_shapes_and_compiles_and_captures_nothing(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine = engine_with_graphs(tmp_path)
    fresh = dict(enumerate(prompts()))
    expected = play(engine, fresh)
    monkeypatch.setattr(engine, "capture", lambda *arguments: steps.append("capture"))
    monkeypatch.setattr(warmup, "run_all_shapes", lambda *arguments: steps.append("run"))
    engine.settings = settings
    engine.compile_and_capture(no_progress)
    assert steps == ["run"] and engine.graphs is None
    assert play(engine, fresh) == expected
    engine.settings = Settings()
    engine.compile_and_capture(no_progress)
    assert steps == ["run", "compile", "capture"]
