"""Compiled layers: one compilation serves all of them."""

import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.rank import RankInfo
from gpu_worker.engine.cuda import compile as compiling
from gpu_worker.engine.cuda.compile import compile_layers, layers_of, stop_compiling
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model import warmup
from gpu_worker.engine.parallel.communicator import Communicator
from tests.support.engine import tiny_models
from tests.support.engine.tiny_engine import NEW_TOKENS, play, prompts
from tests.support.engine.tiny_models import FAMILIES, VOCAB


@pytest.fixture
def dynamo() -> Iterator[Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [("Llama", {}), ("DeepSeek-V3", {"first_k_dense_replace": 3})],
    ids=["Llama", "latents"],
)
def test_one_compilation_serves_all_layers(
    family: str,
    changes: dict[str, Any],
    tmp_path: Path,
    like_cuda: Callable[[Path], Engine],
    dynamo: Any,
) -> None:
    """One for one token, one for any number; and the ids are the same."""
    kind, options = FAMILIES[family]
    model = tiny_models.save(tmp_path, kind, options | changes)
    expected = {row: tiny_models.generate(model, prompt, NEW_TOKENS) for row, prompt in enumerate(prompts())}
    engine = like_cuda(tmp_path)
    engine.graphs = None

    def try_out() -> None:
        warmup.run_all_shapes(engine.forward, VOCAB, engine.block_size)

    assert compile_layers(engine.loaded.model, engine.loaded.attentions, try_out) == 3
    stop_compiling()
    compiled = dynamo["stats"]["unique_graphs"]
    assert 1 <= compiled <= 3 and not dynamo["graph_break"]
    assert play(engine, dict(enumerate(prompts()))) == expected
    assert dynamo["stats"]["unique_graphs"] == compiled


@pytest.fixture
def first_of_two() -> Iterator[Communicator]:
    """Rank 0 of two, whose other rank is not there: what is sent to it is lost."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    alone = Communicator(RankInfo())
    alone.world_size = 2
    yield alone
    dist.destroy_process_group()


@pytest.mark.slow
def test_one_compilation_serves_all_layers_of_a_rank(
    tmp_path: Path, like_cuda: Callable[..., Engine], dynamo: Any, first_of_two: Communicator
) -> None:
    kind, options = FAMILIES["Llama"]
    tiny_models.save(tmp_path, kind, options | {"num_hidden_layers": 6})
    engine = like_cuda(tmp_path, communicator=first_of_two)
    engine.graphs = None

    def try_out() -> None:
        warmup.run_all_shapes(engine.forward, VOCAB, engine.block_size)

    assert compile_layers(engine.loaded.model, engine.loaded.attentions, try_out) == 6
    assert dynamo["stats"]["unique_graphs"] <= 3 and not dynamo["graph_break"]


@pytest.mark.slow
def test_more_compilations_than_allowed_leave_all_layers_as_they_are(
    tmp_path: Path,
    like_cuda: Callable[[Path], Engine],
    dynamo: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Torch by itself would leave some uncompiled, and say nothing."""
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine = like_cuda(tmp_path)
    engine.graphs = None
    model, attentions = engine.loaded.model, engine.loaded.attentions
    monkeypatch.setattr(compiling, "MAX_COMPILATIONS", 1)

    def try_out() -> None:
        warmup.run_all_shapes(engine.forward, VOCAB, engine.block_size)

    assert compile_layers(model, attentions, try_out) == 0 and "its layers are not compiled" in caplog.text
    assert all(layer._compiled_call_impl is None for layer in layers_of(model, attentions))


@pytest.mark.slow
def test_layers_that_cannot_be_compiled_run_as_they_are(
    tmp_path: Path, dynamo: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_models.save(tmp_path, *FAMILIES["Llama"])

    def fail() -> None:
        raise torch._dynamo.exc.InternalTorchDynamoError("no compiler")

    attentions = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    assert compile_layers(model, attentions, fail) == 0 and "no compiler" in caplog.text
    assert all(layer._compiled_call_impl is None for layer in layers_of(model, attentions))


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
