"""Parent death: descendants of a killed process end within three seconds, in whatever state they are."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.support.fleet.fleet import have_ended
from tests.support.waiting import wait_until_sync

GONE_S = 30.0
BIND = "from common.process.launch import die_with_parent; die_with_parent();"
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
NEST = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BIND + SLEEP!r}])"
# Three children: a Python process, one with a child of its own, and a program that is not Python.
PARENT = f"""
import os, subprocess, sys
own = os.environ | {{"PARENT_PID": str(os.getpid())}}
children = [
    subprocess.Popen(command, env=own, start_new_session=in_session, stdout=subprocess.PIPE)
    for command, in_session in (
        ([sys.executable, "-c", {BIND + SLEEP!r}], True),
        ([sys.executable, "-c", {BIND + NEST!r}], True),
        ([sys.executable, "-m", "common.process.launch", "sh", "-c", "echo up; exec sleep 600"], False),
    )
]
for child in children:
    assert child.stdout.readline() == b"up\\n"
print("up", flush=True)
children[0].wait()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    descendants = psutil.Process(process.pid).children(recursive=True)
    try:
        yield process
    finally:
        for leftover in (
            [psutil.Process(process.pid), *descendants] if process.poll() is None else descendants
        ):
            with contextlib.suppress(psutil.NoSuchProcess):
                leftover.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_descendants_end_with_a_killed_parent(parent: subprocess.Popen[bytes], stopped: bool) -> None:
    descendants = psutil.Process(parent.pid).children(recursive=True)
    assert len(descendants) == 4
    if stopped:
        for process in descendants:
            process.suspend()
    parent.kill()
    parent.wait()
    wait_until_sync(lambda: have_ended(descendants), GONE_S)


def run_bound(parent_pid: int) -> int:
    environ = os.environ | {"PARENT_PID": str(parent_pid)}
    return subprocess.run(
        [sys.executable, "-c", BIND + "import os; assert 'PARENT_PID' not in os.environ"], env=environ
    ).returncode


def test_a_parent_that_ended_before_the_call_is_noticed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert run_bound(gone.pid) == -signal.SIGKILL


def test_a_process_without_a_parent_to_follow_runs_on() -> None:
    assert run_bound(0) == 0
    assert run_bound(os.getpid()) == 0
