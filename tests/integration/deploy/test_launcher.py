"""Supervision, over fake gateways, batchers and workers and a real broker."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import redis

from common.broker.keys import Keys
from common.messages.codec import decode
from common.messages.plan import WorkerDied
from deploy.launcher.launcher import ONE_REQUEST_S
from tests.support.fleet.fleet import have_ended, url_of
from tests.support.forks.client import ForkedProcess
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync

GONE_S = 30.0


@dataclass
class Launched:
    process: subprocess.Popen[str]
    directory: Path

    def notes(self, *, of: str = "") -> list[str]:
        path = self.directory / "notes"
        return (
            [line for line in path.read_text().splitlines() if line.startswith(of)] if path.exists() else []
        )

    def starts(self, name: str) -> list[tuple[int, str]]:
        words = [line.split() for line in self.notes(of=f"{name} start")]
        return [(int(pid), incarnation) for _, _, pid, incarnation in words]

    def ready(self) -> str:
        """Wait for the launcher's line; by then every process has started."""
        wait_until_sync(
            lambda: self.process.poll() is not None or all(map(self.starts, ("g0", "b0", "w0", "w1")))
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.error()
        return line

    def error(self) -> str:
        return (self.directory / "stderr").read_text()

    def broker(self) -> psutil.Process:
        return next(
            child for child in psutil.Process(self.process.pid).children() if child.name() == "valkey-server"
        )

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(url_of(self.broker()))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[], Launched]]:
    processes = []

    def start() -> Launched:
        command = [sys.executable, "-m", "tests.support.fleet.fake_fleet", str(tmp_path), str(free_port())]
        with (tmp_path / "stderr").open("w") as error:
            processes.append(ForkedProcess(command, stdout=subprocess.PIPE, stderr=error, text=True))
        return Launched(processes[-1], tmp_path)

    yield start
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def test_a_ready_fleet_says_where_it_is_and_a_killed_worker_restarts_and_the_batcher_is_informed(
    launch: Callable[[], Launched],
) -> None:
    """A new incarnation is started. The first lines of a ready fleet are URL, page, docs and a command."""
    fleet = launch()
    url = fleet.ready().split()[-1]
    assert fleet.process.stdout is not None
    page, docs, example = (fleet.process.stdout.readline() for _ in range(3))
    assert url.startswith("http://127.0.0.1:")
    assert page.startswith(f"  page: {url} ")
    assert docs == f"  docs: {url}/docs\n"
    assert example.startswith(f"  try:  curl -N {url}/generate_stream")
    [(pid, incarnation)] = fleet.starts("w1")
    os.kill(pid, signal.SIGKILL)
    wait_until_sync(lambda: len(fleet.starts("w1")) == 2)
    assert fleet.starts("w1")[1][1] != incarnation
    assert len(fleet.starts("w0")) == 1
    with fleet.client() as client:
        [(_, entry)] = wait_until_sync(lambda: client.xrange(Keys("default").control))
    assert decode(WorkerDied, entry[b"died"]) == WorkerDied(incarnation)
    assert "w1 ended" in fleet.error()
    assert "killed by SIGKILL; starts again in 0.0 s" in fleet.error()
    os.kill(fleet.starts("w0")[0][0], signal.SIGTERM)
    wait_until_sync(lambda: len(fleet.starts("w0")) == 2)
    warned = [line for line in fleet.error().splitlines() if " W serve " in line]
    assert not any("w0 ended" in line for line in warned), "it was told to end"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells who is stopped")
def test_a_stopped_worker_is_replaced_and_a_stopped_or_killed_broker(launch: Callable[[], Launched]) -> None:
    fleet = launch()
    fleet.ready()
    [(pid, incarnation)] = fleet.starts("w1")
    os.kill(pid, signal.SIGSTOP)
    wait_until_sync(lambda: len(fleet.starts("w1")) == 2)
    assert f"w1 is ended: process {pid} was stopped" in fleet.error()
    with fleet.client() as client:
        [(_, entry)] = wait_until_sync(lambda: client.xrange(Keys("default").control))
        assert decode(WorkerDied, entry[b"died"]) == WorkerDied(incarnation)
        for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL):
            old = fleet.broker().pid
            os.kill(old, number)
            wait_until_sync(functools.partial(has_broker_besides, fleet, old))
            wait_until_sync(lambda: answers(client))
            assert client.xlen(Keys("default").control) == 1, "it has its data, on its port"


def has_broker_besides(fleet: Launched, old: int) -> bool:
    return any(
        child.pid != old and child.name() == "valkey-server"  # the old one may be gone meanwhile
        for child in psutil.Process(fleet.process.pid).children()
    )


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.exceptions.RedisError:
        return False


def test_sigterm_drains_gateways_first_and_supervises_the_others_meanwhile(
    launch: Callable[[], Launched],
) -> None:
    fleet = launch()
    (fleet.directory / "hold").touch()
    fleet.ready()
    fleet.process.terminate()
    wait_until_sync(lambda: "g0 terminated" in fleet.notes())
    os.kill(fleet.starts("w0")[0][0], signal.SIGKILL)
    wait_until_sync(lambda: len(fleet.starts("w0")) == 2)
    assert not [line for line in fleet.notes() if line.endswith("terminated") and not line.startswith("g0")]
    (fleet.directory / "hold").unlink()
    assert fleet.process.wait(60) == 0
    notes = fleet.notes()
    assert {"b0 end", "w1 end"} <= set(notes[notes.index("g0 end") :])
    assert len(fleet.starts("g0")) == 1


def test_a_second_signal_ends_the_fleet_now(launch: Callable[[], Launched]) -> None:
    fleet = launch()
    (fleet.directory / "hold").touch()
    fleet.ready()
    children = psutil.Process(fleet.process.pid).children(recursive=True)
    fleet.process.send_signal(signal.SIGINT)
    wait_until_sync(lambda: "g0 terminated" in fleet.notes())
    wait_until_sync(
        lambda: fleet.process.poll() is not None or fleet.process.send_signal(signal.SIGINT),  # type: ignore[func-returns-value]
        ONE_REQUEST_S + GONE_S,
    )
    assert fleet.process.returncode != 0
    wait_until_sync(lambda: have_ended(children))
    assert "for running requests to finish" in fleet.error()
    assert "a second signal: the fleet ends without waiting for requests" in fleet.error()
    assert "Unknown child process" not in fleet.error()


def test_a_killed_launcher_leaves_no_process_not_even_stopped_ones(launch: Callable[[], Launched]) -> None:
    fleet = launch()
    fleet.ready()
    children = psutil.Process(fleet.process.pid).children(recursive=True)
    assert len(children) == 5
    os.kill(fleet.starts("w0")[0][0], signal.SIGSTOP)
    fleet.process.kill()
    wait_until_sync(lambda: have_ended(children), GONE_S)


@pytest.mark.parametrize(
    ("exit_code", "ours", "last"),
    [(78, 78, "NAME: the cause that w0 found"), (1, 1, "w0 ended before the fleet was ready: exit code 1")],
)
def test_a_process_that_ends_before_ready_ends_the_start(
    launch: Callable[[], Launched], tmp_path: Path, exit_code: int, ours: int, last: str
) -> None:
    (tmp_path / "loading").touch()
    (tmp_path / "w0.fails").write_text(str(exit_code))
    fleet = launch()
    assert fleet.process.wait(60) == ours
    assert fleet.error().splitlines()[-1].endswith(last)
    assert len(fleet.starts("w0")) == 1


def test_a_restart_that_refuses_a_setting_leaves_the_others_running(launch: Callable[[], Launched]) -> None:
    """Memory that others took meanwhile comes back. The process starts again with growing pauses, and the
    others serve on.
    """
    fleet = launch()
    fleet.ready()
    (fleet.directory / "w0.fails").write_text("78")
    os.kill(fleet.starts("w0")[0][0], signal.SIGKILL)
    wait_until_sync(
        lambda: fleet.error().count("exit code 78, for the setting named above; starts again in") >= 2
    )
    assert "NAME: the cause that w0 found" in fleet.error()
    (fleet.directory / "w0.fails").unlink()
    wait_until_sync(lambda: len(fleet.notes(of="w0 runs")) == 2)
    assert len(fleet.starts("w0")) >= 4
    assert len(fleet.starts("g0")) == len(fleet.starts("w1")) == 1
    fleet.process.terminate()
    assert fleet.process.wait(60) == 0
    assert "w0 end" in fleet.notes()
