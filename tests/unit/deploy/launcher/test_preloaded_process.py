"""A process that waits to become a worker, played by a script that imports nothing."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from common.process.launch import PRELOAD_FLAG
from deploy.launcher import process as processes
from deploy.launcher.process import ENDS_FIRST, PreloadedProcess, SupervisedProcess, memory_score
from tests.support.waiting import wait_until

FAKE = """
import os, sys, time
from pathlib import Path
from common.process.launch import wait_for_place
if "--preload" in sys.argv:
    while Path(os.environ["IMPORTS"]).exists():
        time.sleep(0.01)
    wait_for_place()
    told = "preloaded"
else:
    told = "alone"
Path(os.environ["TOLD"]).write_text(f"{os.getpid()} {told} {os.environ['INCARNATION']}")
time.sleep(600)
"""


class Workshop:
    """A preloaded process, and a worker `w0` that may use it; `imports` is a file that keeps it importing."""

    def __init__(self, directory: Path, flags: list[str], kind: str = "worker") -> None:
        self.imports, self.told = directory / "imports", directory / "told"
        command = [sys.executable, "-c", FAKE]
        environ = {"IMPORTS": str(self.imports), "TOLD": str(self.told)}
        self.preloaded = PreloadedProcess(kind, command, environ, lambda: flags)
        self.worker = SupervisedProcess("worker", "w0", command, environ, self.preloaded)
        self.are_ready = asyncio.Event()
        self.are_ready.set()
        self.are_busy, self.looks_at_requests = False, 0

    async def workers_are_ready(self) -> bool:
        return self.are_ready.is_set()

    async def has_requests(self) -> bool:
        self.looks_at_requests += 1
        return self.are_busy

    async def ready(self) -> int:
        """The process that waits, once it has imported everything."""
        await wait_until(lambda: self.preloaded.waiting is not None and self.preloaded.waiting.is_ready)
        assert self.preloaded.waiting is not None
        return self.preloaded.waiting.process.pid

    async def start(self) -> list[str]:
        """Start the worker. Returns its process id, how it started, and its incarnation."""
        self.told.unlink(missing_ok=True)
        running = asyncio.create_task(self.worker.run_once())
        told = await wait_until(lambda: self.told.exists() and self.told.read_text())
        self.worker.kill()
        await running
        return str(told).split()


@contextlib.asynccontextmanager
async def workshop(
    directory: Path, *flags: str, kind: str = "worker", busy: bool = False
) -> AsyncIterator[Workshop]:
    """Leaving ends the keeping, and checks that it leaves no process."""
    others = set(psutil.Process().children(recursive=True))
    shop = Workshop(directory, [*flags], kind)
    shop.are_busy = busy
    keeping = asyncio.create_task(shop.preloaded.keep_one_waiting(shop.workers_are_ready, shop.has_requests))
    try:
        yield shop
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        assert keeping.cancelled()
        assert not set(psutil.Process().children(recursive=True)) - others


async def test_a_preloaded_process_becomes_the_next_worker_and_is_replaced(tmp_path: Path) -> None:
    """Not before the workers are ready again: it would take processor time from the one that loads."""
    async with workshop(tmp_path, PRELOAD_FLAG) as shop:
        first = await shop.ready()
        shop.are_ready.clear()
        assert await shop.start() == [str(first), "preloaded", shop.worker.incarnation]
        assert (await shop.start())[1] == "alone"
        assert shop.preloaded.waiting is None
        shop.are_ready.set()
        second = await shop.ready()
        assert second != first
        assert await shop.start() == [str(second), "preloaded", shop.worker.incarnation]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such scores")
async def test_the_kernel_ends_a_preloaded_process_first_until_it_is_the_worker(tmp_path: Path) -> None:
    async with workshop(tmp_path, PRELOAD_FLAG) as shop:
        score = Path(f"/proc/{await shop.ready()}/oom_score_adj")
        assert int(score.read_text()) == ENDS_FIRST
        running = asyncio.create_task(shop.worker.run_once())
        await wait_until(lambda: shop.worker.pid)
        assert int(score.read_text()) == memory_score()
        shop.worker.kill()
        await running


@pytest.mark.parametrize(("kind", "how"), [("gateway", "preloaded"), ("worker", "alone")])
async def test_a_gateway_that_still_imports_is_used_and_a_worker_is_replaced(
    tmp_path: Path, kind: str, how: str
) -> None:
    """The gateway is further than one that starts; the worker's engine loads at a low priority."""
    async with workshop(tmp_path, PRELOAD_FLAG, kind=kind) as shop:
        shop.imports.touch()
        await wait_until(lambda: shop.preloaded.waiting)
        assert shop.preloaded.waiting is not None
        pid = shop.preloaded.waiting.process.pid
        shop.are_ready.clear()
        starting = asyncio.create_task(shop.start())
        await wait_until(lambda: shop.worker.pid)
        assert shop.preloaded.waiting is None
        shop.imports.unlink()
        started = await starting
        assert started[1:] == [how, shop.worker.incarnation] and (started[0] == str(pid)) == (
            how == "preloaded"
        )
        shop.are_ready.set()
        assert await shop.ready() != pid


async def test_requests_that_run_go_first_but_not_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "POLL_S", 0.01)
    monkeypatch.setattr(processes, "BUSY_S", 0.05)
    async with workshop(tmp_path, PRELOAD_FLAG, busy=True) as shop:
        await shop.ready()
        assert shop.looks_at_requests >= 5


async def test_a_process_that_does_not_answer_is_ended_and_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ACCEPT_TIMEOUT_S", 0.1)
    async with workshop(tmp_path, PRELOAD_FLAG) as shop:
        pid = await shop.ready()
        os.kill(pid, signal.SIGSTOP)
        assert (await shop.start())[1] == "alone"
        assert not psutil.pid_exists(pid)


async def test_a_worker_starts_if_the_preloaded_process_dies_while_it_is_asked(tmp_path: Path) -> None:
    """What it was sent is unread, which resets the connection."""
    async with workshop(tmp_path, PRELOAD_FLAG) as shop:
        pid = await shop.ready()
        os.kill(pid, signal.SIGSTOP)
        asked = shop.preloaded.waiting
        assert asked is not None
        starting = asyncio.create_task(shop.start())
        await wait_until(asked.taken.is_set)
        os.kill(pid, signal.SIGKILL)
        assert (await starting)[1] == "alone"


async def test_a_worker_starts_if_the_preloaded_command_is_missing(tmp_path: Path) -> None:
    async with workshop(tmp_path, PRELOAD_FLAG) as shop:
        await shop.ready()
        shop.preloaded.command = ["/nowhere/python"]
        assert (await shop.start())[1] == "preloaded"
        assert (await shop.start())[1] == "alone"
