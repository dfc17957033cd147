"""Order on CUDA: what is copied, planned or replayed while the device is busy is what it was when it was
launched. On CPU everything is computed at once, and only the tests themselves are proved.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gpu_worker.engine.attention.backend import Geometry, KVCache, LayerSpec
from gpu_worker.engine.batch.inputs import build_inputs, to_device
from gpu_worker.engine.batch.row import StepSlices
from gpu_worker.engine.cuda.graphs import PLAIN, CudaGraphs
from gpu_worker.engine.engine import InFlightStep, copy_step
from gpu_worker.engine.sampling.sampler import SamplerOutput
from tests.gpu.test_attention import flash_pair
from tests.support.engine.attention_pair import LENGTHS, Pair, parts_of
from tests.support.engine.on_cuda import ANYWHERE, FLASH_FAMILIES, ON_GPUS, needs_flash
from tests.support.engine.row_steps import BLOCKS, CPU, rows

BUSY_CYCLES = 10**9
"""Half a second of a GPU's time, and more."""
NUM_UPLOADS = 200


def keep_busy(device: str) -> Any:
    """Give the device work → an event behind it; None on CPU."""
    if device == "cpu":
        return None
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@ON_GPUS
def test_uploads_do_not_see_what_the_host_writes_later(device: str) -> None:
    """Each upload has pinned memory of its own until the device has read it, though the arrays are written
    again, and more uploads follow, while the device is busy.
    """
    where, array = torch.device(device), np.zeros(4099, np.int32)
    uploaded = [to_device(array, where) for _ in range(NUM_UPLOADS)]  # pinned memory is there
    torch.cuda.synchronize()
    uploaded.clear()
    busy = keep_busy(device)
    for number in range(NUM_UPLOADS):
        array[:] = number
        uploaded.append(to_device(array, where))
    assert not busy.query(), "an upload waited for the device"
    for number, tensor in enumerate(uploaded):
        assert (tensor == number).all()


@ANYWHERE
def test_samples_are_read_when_their_step_is_over(device: str) -> None:
    """Not before, though the copy to the host is queued at once; memory of the samples is not taken by what
    is allocated meanwhile.
    """
    where = torch.device(device)

    def launch() -> InFlightStep:
        ids = torch.arange(64, device=where).mul_(3)
        logprobs = torch.full((64,), -0.5, device=where)
        output = SamplerOutput(ids, logprobs, ids[:, None][:, :0], logprobs[:, None][:, :0])
        launched = InFlightStep(1, StepSlices(()), torch.empty(0, 5, device=where), 0.0)
        in_flight = replace(copy_step(launched, [None] * 64, output, []), ids=None)
        for number in range(20):  # where the samples were, if their memory were free
            torch.full((64,), number, device=where)
        return in_flight

    launch().read()  # pinned memory is there, and kernels are loaded: the driver waits for the device to load
    busy = keep_busy(device)
    in_flight = launch()
    if busy is not None:
        assert not in_flight.is_done and not busy.query()
    samples = in_flight.read()
    assert samples.ids == [3 * number for number in range(64)] and set(samples.logprobs) == {-0.5}
    assert busy is None or in_flight.is_done


def pair_with_plans(device: str) -> Pair:
    """Attention that the host plans, prompts and rows that decode: scores are soft-capped."""
    needs_flash(device)
    layer = LayerSpec(2, 4, None, 0.125, 64, 64, 5.0)
    return flash_pair(Geometry([layer], 16, torch.bfloat16, torch.bfloat16), torch.device(device))


@ANYWHERE
def test_plans_that_wait_in_pinned_memory_are_not_overwritten(device: str) -> None:
    """Three steps are planned and launched while the device is busy: a plan waits until the one before is
    copied.
    """
    torch.manual_seed(0)
    pair, lines = pair_with_plans(device), rows(16, LENGTHS)
    steps = [parts_of(lines, [(row, 0, LENGTHS[row])]) for row in (0, 2, 3)]
    given = [pair.tokens(sum(part.count for part in slices)) for slices in steps]
    exact = [pair.attend(slices, own, None) for slices, own in zip(steps, given, strict=True)]
    on_device = [[tensor.to(pair.device) for tensor in own] for own in given]
    keep_busy(device)
    found = []
    for slices, own in zip(steps, on_device, strict=True):
        pair.other.prepare_forward(build_inputs(slices, 16, pair.device))
        found.append(pair.other.attend(pair.modules[1][0], *own, None))
    for outputs, again in zip(exact, found, strict=True):
        pair.check([outputs[0], again], "planned while the device was busy")


@ANYWHERE
def test_captured_plans_are_those_of_their_own_replay(device: str, flash: Callable[..., Any]) -> None:
    """Replays follow each other while the device is busy: plans and inputs of the second step must not reach
    the first. Soft caps need plans.
    """
    _, engine = flash(FLASH_FAMILIES["Gemma2"])
    graphs = engine.graphs
    assert isinstance(graphs, CudaGraphs) and not engine.loaded.backend.plan_free
    tables = np.arange(1, 11, dtype=np.int32).reshape(2, 5)
    for table, value in zip(tables, (0.5, -0.5), strict=True):
        engine.fill([table], value)
    staged = [
        np.vstack((np.array([[7], *[[63 + 7 * number]] * 2, [0]], np.int32), table[:, None]))
        for number, table in enumerate(tables)
    ]

    def replay(inputs: Any) -> torch.Tensor:
        assert isinstance(graphs, CudaGraphs)
        graphs.copy_inputs(inputs, 1)
        graphs.graphs[1, PLAIN]()
        return graphs.logits[:1].clone()

    with torch.inference_mode():
        alone = [replay(inputs).cpu() for inputs in staged]
        for _ in range(3):
            keep_busy(device)
            together = [replay(inputs) for inputs in staged]
            for one, other in zip(alone, together, strict=True):
                assert torch.equal(one, other.cpu())
    assert not torch.equal(alone[0], alone[1])


@ANYWHERE
def test_blocks_are_copied_and_filled_in_the_order_of_the_calls(device: str) -> None:
    where = torch.device(device)
    geometry = Geometry([LayerSpec(2, 1, None, 1.0, 64, 64)] * 2, 16, torch.bfloat16, torch.bfloat16)
    cache = KVCache(geometry, BLOCKS, where)
    cache.fill(range(BLOCKS + 1), 1.0)
    keep_busy(device)
    cache.copy([(1, 2), (3, 4)])
    cache.fill([1], 2.0)
    cache.copy([(1, 3)])
    cache.fill([1], 0.0)
    for tensor in (*cache.keys, *cache.values):
        means = tensor[:6].to(CPU, torch.float32).mean((1, 2, 3)).tolist()
        assert means == [1.0, 0.0, 1.0, 2.0, 1.0, 1.0]
