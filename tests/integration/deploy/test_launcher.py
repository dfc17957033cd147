"""Supervision, over fake gateways, batchers and workers and a real broker."""

import functools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from common.broker.keys import Keys
from common.messages.codec import decode
from common.messages.plan import WorkerDied
from deploy.launcher.launcher import ONE_REQUEST_S
from tests.support.fleet.fleet import Fleet, have_ended
from tests.support.waiting import wait_until_sync

GONE_S = 30.0


class FakeFleet(Fleet):
    """A launcher over fakes (tests/support/fleet/fake_fleet.py)."""

    def __init__(self) -> None:
        super().__init__(pythonpath=Path(__file__).parents[3])
        self.command = "tests.support.fleet.fake_fleet", str(self.directory), str(self.settings["port"])

    def notes(self, *, of: str = "") -> list[str]:
        path = self.directory / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(of)]

    def starts(self, name: str) -> list[tuple[int, str]]:
        words = [line.split() for line in self.notes(of=f"{name} start")]
        return [(int(pid), incarnation) for _, _, pid, incarnation in words]

    def started(self) -> None:
        """Start, and wait until every process has started, and the launcher says that the fleet is ready."""
        self.start().ready()
        wait_until_sync(lambda: all(map(self.starts, ("g0", "b0", "w0", "w1"))))

    def broker(self) -> psutil.Process:
        return psutil.Process(self.pid("broker"))

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.redis_url)


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    fleet = FakeFleet()
    yield fleet
    fleet.kill()


def test_a_killed_worker_restarts(fleet: FakeFleet) -> None:
    """As a new incarnation."""
    fleet.started()
    [(pid, incarnation)] = fleet.starts("w1")
    os.kill(pid, signal.SIGKILL)
    wait_until_sync(lambda: len(fleet.starts("w1")) == 2)
    assert fleet.starts("w1")[1][1] != incarnation
    assert len(fleet.starts("w0")) == 1
    with fleet.client() as client:
        [(_, entry)] = wait_until_sync(lambda: client.xrange(Keys("default").control))
    assert decode(WorkerDied, entry[b"died"]) == WorkerDied(incarnation)
    assert "w1 ended" in fleet.errors()
    assert "killed by SIGKILL; starts again in 0.0 s" in fleet.errors()
    os.kill(fleet.starts("w0")[0][0], signal.SIGTERM)
    wait_until_sync(lambda: len(fleet.starts("w0")) == 2)
    warned = [line for line in fleet.errors().splitlines() if " W serve " in line]
    assert not any("w0 ended" in line for line in warned), "it was told to end"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells who is stopped")
def test_a_stopped_worker_is_replaced_and_a_stopped_or_killed_broker(fleet: FakeFleet) -> None:
    fleet.started()
    [(pid, incarnation)] = fleet.starts("w1")
    os.kill(pid, signal.SIGSTOP)
    wait_until_sync(lambda: len(fleet.starts("w1")) == 2)
    assert f"w1 is ended: process {pid} was stopped" in fleet.errors()
    with fleet.client() as client:
        [(_, entry)] = wait_until_sync(lambda: client.xrange(Keys("default").control))
        assert decode(WorkerDied, entry[b"died"]) == WorkerDied(incarnation)
        for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL):
            old = fleet.broker().pid
            os.kill(old, number)
            wait_until_sync(functools.partial(has_broker_besides, fleet, old))
            wait_until_sync(lambda: answers(client))
            assert client.xlen(Keys("default").control) == 1, "it has its data, on its port"


def has_broker_besides(fleet: FakeFleet, old: int) -> bool:
    return any(
        child.pid != old and child.name() == "valkey-server"  # the old one may be gone meanwhile
        for child in psutil.Process(fleet.launcher.pid).children()
    )


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.exceptions.RedisError:
        return False


def test_sigterm_drains_gateways_first_and_supervises_the_others_meanwhile(fleet: FakeFleet) -> None:
    (fleet.directory / "hold").touch()
    fleet.started()
    fleet.launcher.terminate()
    wait_until_sync(lambda: "g0 terminated" in fleet.notes())
    os.kill(fleet.starts("w0")[0][0], signal.SIGKILL)
    wait_until_sync(lambda: len(fleet.starts("w0")) == 2)
    assert not [line for line in fleet.notes() if line.endswith("terminated") and not line.startswith("g0")]
    (fleet.directory / "hold").unlink()
    assert fleet.launcher.wait(60) == 0
    notes = fleet.notes()
    assert {"b0 end", "w1 end"} <= set(notes[notes.index("g0 end") :])
    assert len(fleet.starts("g0")) == 1


def test_a_second_signal_ends_the_fleet_now(fleet: FakeFleet) -> None:
    (fleet.directory / "hold").touch()
    fleet.started()
    children = psutil.Process(fleet.launcher.pid).children(recursive=True)
    fleet.launcher.send_signal(signal.SIGINT)
    wait_until_sync(lambda: "g0 terminated" in fleet.notes())
    wait_until_sync(
        lambda: fleet.launcher.poll() is not None or fleet.launcher.send_signal(signal.SIGINT),  # type: ignore[func-returns-value]
        ONE_REQUEST_S + GONE_S,
    )
    assert fleet.launcher.returncode != 0
    wait_until_sync(lambda: have_ended(children))
    assert "for running requests to finish" in fleet.errors()
    assert "a second signal: the fleet ends without waiting for requests" in fleet.errors()
    assert "Unknown child process" not in fleet.errors()


def test_a_killed_launcher_leaves_no_process_not_even_stopped_ones(fleet: FakeFleet) -> None:
    fleet.started()
    children = psutil.Process(fleet.launcher.pid).children(recursive=True)
    assert len(children) == 5
    os.kill(fleet.starts("w0")[0][0], signal.SIGSTOP)
    fleet.launcher.kill()
    wait_until_sync(lambda: have_ended(children), GONE_S)


@pytest.mark.parametrize(
    ("exit_code", "ours", "last"),
    [(78, 78, "NAME: the cause that w0 found"), (1, 1, "w0 ended before the fleet was ready: exit code 1")],
)
def test_a_process_that_ends_before_ready_ends_the_start(
    fleet: FakeFleet, exit_code: int, ours: int, last: str
) -> None:
    (fleet.directory / "loading").touch()
    (fleet.directory / "w0.fails").write_text(str(exit_code))
    assert fleet.start().launcher.wait(60) == ours
    assert fleet.errors().splitlines()[-1].endswith(last)
    assert len(fleet.starts("w0")) == 1


def test_a_restart_that_refuses_a_setting_leaves_the_others_running(fleet: FakeFleet) -> None:
    """Memory that others took meanwhile comes back. The process starts again with growing pauses, and the
    others serve on.
    """
    fleet.started()
    (fleet.directory / "w0.fails").write_text("78")
    os.kill(fleet.starts("w0")[0][0], signal.SIGKILL)
    wait_until_sync(
        lambda: fleet.errors().count("exit code 78, for the setting named above; starts again in") >= 2
    )
    assert "NAME: the cause that w0 found" in fleet.errors()
    (fleet.directory / "w0.fails").unlink()
    wait_until_sync(lambda: len(fleet.notes(of="w0 runs")) == 2)
    assert len(fleet.starts("w0")) >= 4
    assert len(fleet.starts("g0")) == len(fleet.starts("w1")) == 1
    fleet.launcher.terminate()
    assert fleet.launcher.wait(60) == 0
    assert "w0 end" in fleet.notes()
