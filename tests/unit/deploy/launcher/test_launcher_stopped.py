"""Stopped processes are told from all others, whoever in a process's family they are."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from common.settings.settings import Settings
from deploy.launcher.fleet import LocalFleet
from deploy.launcher.launcher import Stop, end_stopped, read_stop
from deploy.launcher.preloaded_process import family
from tests.support.waiting import wait_until_sync

FAMILY = "import subprocess; subprocess.run(['sleep', '600'])"


@pytest.fixture
def parent() -> Iterator[psutil.Process]:
    """A process that has started another."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], start_new_session=True) as process:
        found = psutil.Process(process.pid)
        wait_until_sync(found.children)
        yield found
        os.killpg(process.pid, signal.SIGKILL)


def stops(parent: psutil.Process) -> list[Stop]:
    return [stop for pid in family(parent.pid) if (stop := read_stop(pid))]


@pytest.mark.parametrize("number", [0, 1])
def test_a_stop_is_found_and_lasts_until_its_process_goes_on(parent: psutil.Process, number: int) -> None:
    victim = [parent, *parent.children()][number]
    assert not stops(parent)
    victim.suspend()
    [stop] = wait_until_sync(lambda: stops(parent))
    assert stop.pid == victim.pid
    assert stops(parent) == [stop]
    victim.resume()
    wait_until_sync(lambda: not stops(parent))


def test_a_process_that_has_ended_is_not_stopped(parent: psutil.Process) -> None:
    [child] = parent.children()
    child.suspend()
    child.kill()
    wait_until_sync(lambda: not psutil.pid_exists(child.pid))
    assert read_stop(child.pid) is None


async def test_a_stopped_grace_of_0_waits_for_stopped_processes() -> None:
    """It ends nobody, so it need not look."""
    await end_stopped(LocalFleet(Settings(stopped_grace_s=0), [], [], [], []))
