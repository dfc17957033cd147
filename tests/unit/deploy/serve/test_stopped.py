"""Stopped processes are told from all others, whoever in a process's family they are."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from common.settings.settings import Settings
from deploy.serve.fleet import LocalFleet
from deploy.serve.stopped import end_stopped, find_stops
from tests.support.waiting import wait_until_sync

FAMILY = "import subprocess; subprocess.run(['sleep', '600'])"


@pytest.fixture
def family() -> Iterator[list[psutil.Process]]:
    """A process, and one that it has started."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], start_new_session=True) as process:
        parent = psutil.Process(process.pid)
        yield [parent, *wait_until_sync(parent.children)]
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [0, 1])
def test_a_stop_is_found_and_lasts_until_its_process_goes_on(
    family: list[psutil.Process], number: int
) -> None:
    parent, victim = family[0], family[number]
    assert not [*find_stops(parent.pid)]
    victim.suspend()
    [stop] = wait_until_sync(lambda: [*find_stops(parent.pid)])
    assert stop.pid == victim.pid
    assert [*find_stops(parent.pid)] == [stop]
    victim.resume()
    wait_until_sync(lambda: not [*find_stops(parent.pid)])


def test_nobody_is_stopped_who_has_ended(family: list[psutil.Process]) -> None:
    family[1].kill()
    wait_until_sync(lambda: not psutil.pid_exists(family[1].pid))
    assert not [*find_stops(family[1].pid)]


async def test_0_waits_for_stopped_processes() -> None:
    """It ends nobody, so it need not look."""
    await end_stopped(LocalFleet(Settings(stopped_grace_s=0), [], [], [], []))
