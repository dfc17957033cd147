"""Captured steps, on CPU: FlashInfer's attention is computed by torch, and a graph is captured by calling
again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.settings.settings import SettingError, Settings
from gpu_worker.engine import engine as engine_module
from gpu_worker.engine.cuda import graphs as graphs_module
from gpu_worker.engine.cuda.graphs import CudaGraphs, graph_sizes, run_without_sync
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.fake_flashinfer import kernels
from tests.support.engine.fake_flashinfer.install import install
from tests.support.engine.on_cuda import noted
from tests.support.engine.tiny_engine import NEW_TOKENS, check_ids, play, prompts
from tests.support.engine.tiny_models import FAMILIES
from tests.support.speculation.knowing_proposer import KnowingProposers
from tests.unit.gpu_worker.engine.batch.test_split_step import limit

if not install():
    pytest.skip("where there is a GPU, the tests marked gpu try the real parts", allow_module_level=True)
from gpu_worker.engine.attention.flashinfer import FlashInferBackend

AMPERE, HOPPER = 8, 9
QUICKLY = [("Qwen2", HOPPER), ("gpt-oss", AMPERE)]
SLOWLY = [
    (family, HOPPER)
    for family in (
        "Phi3-longrope",
        "DeepSeek-V3",
        "Llama",
        "Mistral",
        "Gemma2",
        "gpt-oss",
        "Qwen3-MoE",
        "GPT2",
        "Llama-longrope",
        "Gemma3-longrope",
        "DeepSeek-V2",
        "MiniCPM3",
    )
] + [(family, AMPERE) for family in ("Qwen2", "Mistral", "Gemma2", "Phi3-longrope")]


@pytest.mark.parametrize(
    ("family", "generation"), [*QUICKLY, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOWLY)]
)
def test_ids_are_those_of_generate(
    family: str, generation: int, tmp_path: Path, like_cuda: Callable[..., Engine]
) -> None:
    """Steps of one to three rows that decode come from graphs, one of which is never full; others do not."""
    model = tiny_models.save(tmp_path, *FAMILIES[family])
    expected = {row: tiny_models.generate(model, prompt, NEW_TOKENS) for row, prompt in enumerate(prompts())}
    engine = like_cuda(tmp_path, generation=generation)
    assert engine.graphs
    check_ids(engine, expected)


def test_steps_of_few_tokens_come_from_graphs(tmp_path: Path, like_cuda: Callable[[Path], Engine]) -> None:
    """Prompts, too: whole, and in chunks beside rows that decode."""
    model = tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine, seen = like_cuda(tmp_path), list[int]()
    assert isinstance(engine.graphs, CudaGraphs)
    graphs = {
        size: (lambda run=run, size=size: (seen.append(size), run()))  # type: ignore[func-returns-value]
        for size, run in engine.graphs.graphs.items()
    }
    engine.graphs.graphs = graphs  # type: ignore[assignment]
    some = dict(enumerate(prompts()[:2]))
    expected = {row: tiny_models.generate(model, ids, NEW_TOKENS) for row, ids in some.items()}
    assert play(engine, some) == expected
    assert list(graphs) == [1, 2, 3, 6, 12, 24, 48, 96, 160, 224, 288, 304]
    whole = next(size for size in graphs if size >= sum(map(len, some.values())))
    assert seen == [whole, *[2] * (NEW_TOKENS - 1)]
    seen.clear()
    with noted(engine) as (computed, replayed):
        assert play(engine, some, prefill_tokens=7) == expected
    assert len(replayed) == len(computed) > sum(computed)


def test_long_prompts_do_not_come_from_graphs(
    tmp_path: Path, like_cuda: Callable[[Path], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of their tokens would read all keys before it."""
    model = tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine, some = like_cuda(tmp_path), dict(enumerate(prompts()[:2]))
    monkeypatch.setattr(graphs_module, "MAX_SEEN_TOKENS", 3)
    with noted(engine) as (computed, replayed):
        assert play(engine, some) == {
            row: tiny_models.generate(model, ids, NEW_TOKENS) for row, ids in some.items()
        }
    assert len(replayed) == sum(computed) < len(computed)


def test_logits_that_a_graph_wrote_are_copied_before_the_next_step(
    tmp_path: Path, like_cuda: Callable[[Path], Engine]
) -> None:
    """All graphs write into one buffer, and the next step is launched before this one is read."""
    model = tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine, ids = like_cuda(tmp_path), prompts()[1]
    engine.runs_ahead = True
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)), until=engine.rows.step)
    span = (len(ids) - 1, 1000, "float32")
    played.run([played.start(0, ids, NEW_TOKENS, ignore_eos=True, logits=span)])
    with torch.inference_mode():
        expected = model(torch.tensor([ids + played.ids[0]])).logits[0, len(ids) - 1 : -1]
    found = [torch.frombuffer(bytearray(values), dtype=torch.float32) for values in played.logits[0].values()]
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("generation", [AMPERE, HOPPER])
def test_proposals_come_from_graphs(
    generation: int, tmp_path: Path, like_cuda: Callable[..., Engine]
) -> None:
    """A proposal is a row of its own there: steps that check some take a larger graph, and give the ids of
    those that check none, whether they are launched behind what is checked or not.
    """
    tiny_models.save(tmp_path, *FAMILIES["Mistral"])
    engine, fresh = like_cuda(tmp_path, generation=generation), dict(enumerate(prompts()))
    expected = play(engine, fresh)
    answers = {tuple(ids): expected[row] for row, ids in fresh.items()}
    for is_sure in (False, True):
        engine.rows.make_proposer = made = KnowingProposers(answers, 0.3, is_sure=is_sure)
        with noted(engine) as (computed, replayed):
            assert play(engine, fresh) == expected
        assert len(replayed) == sum(computed) > 0 and max(made.steps) > 1


def test_planned_steps_are_planned_before_they_are_replayed(
    tmp_path: Path, like_cuda: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card that XQA is not compiled for: each replay behind one plan for each view, of as many rows as
    the graph; none within it.
    """
    tiny_models.save(tmp_path, *FAMILIES["Mistral"])
    engine, seen = like_cuda(tmp_path, generation=AMPERE), list[tuple[str, int]]()
    assert isinstance(engine.graphs, CudaGraphs) and not engine.loaded.backend.plan_free
    plan = kernels.BatchDecodeWithPagedKVCacheWrapper.plan

    def note_plan(self: Any, ends: torch.Tensor, *given: Any, **options: Any) -> None:
        seen.append(("plan", len(ends) - 1))
        plan(self, ends, *given, **options)

    def note_replay(size: int, run: Callable[[], None]) -> Callable[[], None]:
        def noted() -> None:
            run()
            seen.append(("replay", size))

        return noted

    monkeypatch.setattr(kernels.BatchDecodeWithPagedKVCacheWrapper, "plan", note_plan)
    graphs = engine.graphs.graphs
    engine.graphs.graphs = {size: note_replay(size, run) for size, run in graphs.items()}
    play(engine, dict(enumerate(prompts()[:2])))
    assert seen[2:] == [("plan", 2), ("replay", 2)] * (NEW_TOKENS - 1)
    assert [what for what, _ in seen[:2]] == ["plan", "replay"], "both prompts"


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
    engine.try_to_capture(Settings(max_batch_size=3))
    assert (
        engine.graphs is None
        and "captured: called a synchronizing CUDA operation;" in caplog.text
        and play(engine, fresh) == expected
    )
    assert modes == ["error", "default"]
    modes.clear()
    with pytest.raises(SettingError, match="cannot be captured"):
        engine.try_to_capture(Settings(deterministic=True))


@pytest.mark.slow
def test_halves_of_a_step_use_graphs(tmp_path: Path, like_cuda: Callable[[Path], Engine]) -> None:
    """A step with a chunk does not fit into memory; its rows that decode come from graphs, all of which write
    the same logits.
    """
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine, fresh = like_cuda(tmp_path), dict(enumerate(prompts()))
    expected = play(engine, fresh, prefill_tokens=7)
    scarce = limit(engine, room=2, since=1, error=torch.OutOfMemoryError("CUDA out of memory"))
    assert play(engine, fresh, prefill_tokens=7) == expected and scarce.num_raised


@pytest.mark.slow
def test_a_long_row_is_split_in_a_graph_of_its_own(
    tmp_path: Path, like_cuda: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside shorter ones; they have captured steps of few sizes, and their ids stay the same."""
    model, seen = tiny_models.save(tmp_path, *FAMILIES["Llama"]), list[tuple[str, int]]()
    monkeypatch.setattr(FlashInferBackend, "splits_rows", lambda backend, lengths: (lengths > 50).any())
    engine, fresh = like_cuda(tmp_path), {0: list(range(3, 60)), 1: [5, 6], 2: [7, 8, 9]}
    graphs = engine.graphs
    assert isinstance(graphs, CudaGraphs) and list(graphs.split_graphs) == [1, 2, 48]

    def note(kind: str, size: int, run: Callable[[], None]) -> Callable[[], None]:
        def noted() -> None:
            seen.append((kind, size))
            run()

        return noted

    graphs.graphs = {size: note("own", size, run) for size, run in graphs.graphs.items()}
    graphs.split_graphs = {size: note("split", size, run) for size, run in graphs.split_graphs.items()}
    for some in ([0, 1], [1, 2]):
        rows = {row: fresh[row] for row in some}
        expected = {row: tiny_models.generate(model, ids, NEW_TOKENS) for row, ids in rows.items()}
        assert play(engine, rows) == expected
    assert seen == [("split", 2)] * (NEW_TOKENS - 1) + [("own", 2)] * (NEW_TOKENS - 1)


def test_sizes_of_graphs_double_while_they_are_small() -> None:
    assert graph_sizes(1, 1) == [1] and graph_sizes(3, 3) == [1, 2, 3]
    assert graph_sizes(20, 256) == [1, 2, 4, 8, 16, 20, 40, 80, 144, 208, 256]
    assert graph_sizes(2, 5) == [1, 2, 4, 5]
    assert graph_sizes(256, 256)[-3:] == [240, 248, 256] and len(graph_sizes(256, 256)) == 35
