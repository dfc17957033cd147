"""A whole fleet with two workers on one GPU, one of which is killed while it streams."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.engine import tiny_models
from tests.support.engine.on_cuda import DEVICES, FLASH_FAMILIES, needs_flash, used_bytes
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load
from tests.support.waiting import wait_until, wait_until_sync

START_S = 500.0
"""FlashInfer may have to compile its kernels."""
NEW_TOKENS = 150
KILLS = 3
NEAR_BYTES = 512 * 2**20
"""Of a GPU's memory: what drivers and allocators may keep."""


@pytest.fixture(params=DEVICES[:1])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    needs_flash(request.param)
    family, sizes = FLASH_FAMILIES["Llama"]
    tiny_models.save_with_bytes(tmp_path, family, sizes | {"max_position_embeddings": 1024})
    fleet = Fleet(
        model_id=str(tmp_path),
        device=request.param,
        dtype="bfloat16",
        num_workers=2,
        max_batch_size=32,
        debug_kv=True,
        cuda_memory_fraction=0.3,
        gpu_locks=str(tmp_path / "locks"),
    )
    try:
        fleet.start().ready(START_S)
        wait_until_sync(lambda: fleet.workers_ready() == 2, START_S)
        yield fleet
    except BaseException:
        print(fleet.errors()[-10_000:])
        raise
    finally:
        fleet.kill()


async def killed(fleet: Fleet, name: str) -> None:
    """SIGKILL to a worker's engine while all streams run: they end whole, and its successor serves."""
    load = Load(fleet, NEW_TOKENS)
    await load.progress(10)
    old = fleet.pid(name)
    [engine] = fleet.engines(name)
    assert load.running
    engine.kill()
    await load.whole()
    await asyncio.to_thread(fleet.restarted, name, old, START_S)
    await wait_until(lambda: fleet.workers_ready() == 2, START_S)


async def test_a_killed_worker_on_a_gpu_costs_no_token(fleet: Fleet) -> None:
    """And leaves nothing behind: neither memory of the GPU, nor open files in those that live on."""
    await Load(fleet, NEW_TOKENS).whole()
    await killed(fleet, "w0")
    before_bytes, others = used_bytes(), [psutil.Process(fleet.pid(name)) for name in ("g0", "b0")]
    before = [one.num_fds() for one in others]
    for kill in range(KILLS):
        await killed(fleet, f"w{kill % 2}")
    await wait_until(lambda: used_bytes() <= before_bytes + NEAR_BYTES)
    await wait_until(
        lambda: all(one.num_fds() <= count + 4 for one, count in zip(others, before, strict=True))
    )
