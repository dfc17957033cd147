"""The successor of a killed worker is a copy of a template, and its answer is whole. They share weights."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gpu_worker.engine.cpu.weight_store import WeightStore
from tests.support.fleet.fleet import READY_S, Fleet, have_ended
from tests.support.load import Load
from tests.support.waiting import wait_until, wait_until_sync

WEIGHTS = "/memfd:tokenfleet weights (deleted)"

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A fleet of one worker of so many ranks."""
    settings = {"kv_cache_bytes": "64MiB", "preload": True, "dtype": "float32"}
    with Fleet(num_shard=request.param, **settings) as fleet:
        yield fleet


def shares_weights() -> bool:
    """Whether this machine can share weights: its shared memory has large pages."""
    handle = os.memfd_create("a trial")
    try:
        WeightStore(handle).begin()
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def shared_segments(pid: int) -> set[str]:
    """Return where in the store the weights of a worker's engines, or of a template, are."""
    process = psutil.Process(pid)
    engines = [one.pid for one in [process, *process.children(recursive=True)]]
    maps = [Path(f"/proc/{engine}/maps").read_text().splitlines() for engine in engines]
    words = [line.split(maxsplit=5) for lines in maps for line in lines]
    return {one[2] for one in words if one[-1] == WEIGHTS}


def holders_of_weights() -> list[str]:
    """Return the file descriptors, of all processes, of memory for shared weights."""
    found = []
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has ended
            found += [str(handle)] if os.readlink(handle) == WEIGHTS else []
    return found


def inode(handle: str) -> int:
    """Return the number of the file behind a descriptor; 0 if it is closed."""
    with contextlib.suppress(OSError):
        return os.stat(handle).st_ino
    return 0


def workers(fleet: Fleet) -> list[dict[str, Any]]:
    processes = httpx.get(f"{fleet.base_url}/fleet").json()["processes"]
    return [process for process in processes if process["kind"] == "worker"]


@pytest.mark.parametrize("fleet", [1, 2], indirect=True)
async def test_successors_are_copies_and_no_token_is_lost(fleet: Fleet) -> None:
    expected = await Load(fleet, 60, 1).whole()
    if fleet.settings["num_shard"] == 1:  # a template loads nothing of several ranks
        template = await wait_until(fleet.preloaded, READY_S)
        assert len(workers(fleet)) == 1, "it is no worker"
        if shares_weights():
            held = shared_segments(fleet.pid("w0"))
            assert shared_segments(template) == held != set()
    for _ in range(2):
        first = fleet.pid("w0")
        load = Load(fleet, 60, 1)
        await load.progress(20)
        os.kill(first, signal.SIGKILL)
        assert await load.whole() == expected
        [worker] = workers(fleet)
        assert worker["pid"] == fleet.restarted("w0", first)
    if fleet.settings["num_shard"] == 1:
        assert fleet.preloaded() == template
        os.kill(template, signal.SIGKILL)
        assert await Load(fleet, 60, 1).whole() == expected
        assert [one["pid"] for one in workers(fleet)] == [worker["pid"]]
        assert await wait_until(fleet.preloaded, READY_S) != template

    everybody = fleet.processes()
    fleet.launcher.terminate()
    assert fleet.launcher.wait(60) == 0
    wait_until_sync(lambda: have_ended(everybody))


@pytest.mark.parametrize("fleet", [1], indirect=True)
def test_nothing_is_left_of_shared_weights_when_all_are_killed(fleet: Fleet) -> None:
    wait_until_sync(fleet.preloaded, READY_S)
    mine = {process.pid for process in fleet.processes()}
    inodes = {inode(one) for one in holders_of_weights() if int(one.split("/")[2]) in mine}
    assert len(inodes) == 1
    for process in fleet.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    fleet.launcher.wait(READY_S)
    wait_until_sync(lambda: not inodes & {inode(one) for one in holders_of_weights()})
