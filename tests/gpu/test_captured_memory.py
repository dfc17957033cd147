"""Memory of CUDA graphs: one pool for all of them, which steps without a graph do not touch, and which
replays do not grow. On CPU a graph calls its functions again.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.engine.cuda.graphs import PLAIN, CaptureError, CudaGraphs, make_capture
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model import warmup
from gpu_worker.engine.model.model import LoadedModel
from tests.support.engine.on_cuda import ANYWHERE, FLASH_FAMILIES, ON_GPUS, SETTINGS
from tests.support.engine.tiny_engine import play, prompts

MIB = 2**20
FEW_BYTES = 2 * MIB
"""What the allocator takes at least for small tensors."""
WORKSPACE_BYTES = 96 * MIB
"""Of cuBLAS, one for each stream; FREE_SHARE of a GPU is left for them."""


def reserved_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def replay(graphs: CudaGraphs, size: int) -> torch.Tensor:
    """Replay a step of rows in blocks of their own → a copy of its logits [size, vocabulary]."""
    ids, positions, slots = (np.full((1, size), value) for value in (7, 9, 0))
    inputs = np.vstack((ids, positions, positions, slots, np.arange(1, 1 + size)[None]))
    with torch.inference_mode():
        graphs.copy_inputs(inputs.astype(np.int32), size)
        graphs.graphs[size, PLAIN]()
        return graphs.logits[:size].clone()


@ANYWHERE
def test_replays_are_the_same_whatever_is_allocated_between_them(
    device: str, flash: Callable[..., Any]
) -> None:
    """Graphs of all sizes in one pool, in any order, with steps without graphs between them: the same bits
    each time.
    """
    _, engine = flash()
    graphs = engine.graphs
    assert isinstance(graphs, CudaGraphs)
    engine.fill([np.arange(1, 1 + SETTINGS["max_batch_size"], dtype=np.int32)], 0.5)
    sizes = [size for size, _ in graphs.graphs if size <= SETTINGS["max_batch_size"]]
    first = {size: replay(graphs, size) for size in sizes}
    for size in (*sizes, *reversed(sizes), *sizes):
        parts = warmup.prompt_parts(engine.loaded, 64)
        engine.forward(parts)  # writes the scratch block only
        noise = [torch.full((number * 1000,), float("nan"), device=device) for number in range(1, 60)]
        assert torch.equal(replay(graphs, size), first[size]), f"{size} rows"
        del noise


@ON_GPUS
def test_a_step_that_waits_is_refused_before_its_capture_begins(device: str) -> None:
    """The allocator and other captures go on."""
    capture, numbers = make_capture(torch.device(device)), torch.arange(8.0, device=device)

    def waits() -> None:
        numbers.add_(numbers.sum().item())

    with pytest.raises(CaptureError, match="synchroniz"):
        capture(waits)

    def copies() -> None:
        numbers.copy_(torch.ones(8))  # from memory that is not pinned

    with pytest.raises(CaptureError, match="synchroniz"):
        capture(copies)

    def adds() -> None:
        numbers.add_(1)

    again = capture(adds)
    before = numbers.clone()
    again()
    assert torch.equal(numbers, before + 1)


@ON_GPUS
def test_all_graphs_share_the_memory_of_the_largest(device: str, flash: Callable[..., Any]) -> None:
    """And replays of all of them take nothing more."""
    _, engine = flash()
    assert isinstance(engine.graphs, CudaGraphs)
    sizes = sorted({size for size, _ in engine.graphs.graphs})
    taken = dict[str, int]()
    for what, some in (("largest", sizes[-1:]), ("all", sizes)):
        engine.graphs = None
        before_bytes = reserved_bytes()
        graphs = CudaGraphs(engine.loaded, sizes[-1], 8)
        graphs.capture(make_capture(torch.device(device)), some)
        taken[what] = reserved_bytes() - before_bytes
        engine.graphs = graphs
    assert taken["all"] <= taken["largest"] + FEW_BYTES * len(sizes)
    held_bytes = reserved_bytes()
    for size in sizes * 3:
        replay(graphs, size)
    assert reserved_bytes() <= held_bytes + FEW_BYTES


@ON_GPUS
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "DeepSeek-V3"])
def test_the_memory_of_captured_steps_was_counted(
    device: str, family: str, flash: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What graphs and their plans keep was measured before the cache was sized: of XQA, of plans in schedules
    that are shared, of latents. Beyond that are workspaces of the stream on which they are captured.
    """
    counted, taken = list[int](), list[int]()
    captured_bytes, capture = warmup.captured_bytes, Engine.capture

    def count(loaded: LoadedModel) -> int:
        counted.append(captured_bytes(loaded))
        return counted[-1]

    def measure(engine: Engine, *arguments: Any) -> None:
        before_bytes = reserved_bytes()
        capture(engine, *arguments)
        taken.append(reserved_bytes() - before_bytes)

    monkeypatch.setattr(warmup, "captured_bytes", count)
    monkeypatch.setattr(Engine, "capture", measure)
    flash(FLASH_FAMILIES[family])
    assert taken[0] <= counted[0] + WORKSPACE_BYTES, f"{counted[0] / MIB:.0f}, then {taken[0] / MIB:.0f} MiB"


@ON_GPUS
def test_memory_does_not_grow_with_steps(device: str, flash: Callable[..., Any]) -> None:
    """Rows and chunks of many sizes, again and again: holes of the allocator are filled."""
    _, engine = flash()
    fresh = dict(enumerate(prompts()))

    def mixed() -> None:
        for prefill_tokens in (1000, 7, 33, 64):
            play(engine, fresh, prefill_tokens)

    mixed()
    torch.cuda.synchronize()
    held_bytes, allocated_bytes = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    for _ in range(5):
        mixed()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= held_bytes + FEW_BYTES
    assert torch.cuda.memory_allocated() <= allocated_bytes + FEW_BYTES
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries
