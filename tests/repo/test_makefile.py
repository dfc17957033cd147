"""`make serve` and its signals, with a fleet of fakes in the place of ours."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.launcher.launcher import ONE_REQUEST_S
from tests.support.fleet.fleet import have_ended
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync

ROOT = Path(__file__).parents[2]
GONE_S = 30.0
ENVIRON = {
    name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
}
"""Variables as in a user's shell: these tests may run under a make of their own."""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A running `make serve`, in a process group of its own as in a terminal; everything is up."""
    program = tmp_path / "tokenfleet"
    launcher = f"{sys.executable} -m tests.support.fleet.fake_fleet {tmp_path} {free_port()}"
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/argv\nexec {launcher}\n')
    program.chmod(0o755)
    command = ["make", "serve", f"BIN={tmp_path}", "ARGS=--port 8080", "-o", ".venv/.installed-to-run"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    everybody: list[psutil.Process] = []
    try:
        assert any("/generate_stream" in line for line in process.stdout)
        wait_until_sync(lambda: (tmp_path / "notes").read_text().count(" start ") == 4)
        everybody = descendants(process)
        yield process
    finally:
        for leftover in everybody or psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                leftover.kill()
        process.kill()
        process.wait()
        process.stdout.close()


def descendants(make: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(make.pid).children(recursive=True)
    assert len(found) == 6
    return found


def test_flags_reach_the_launcher(make: subprocess.Popen[str], tmp_path: Path) -> None:
    assert (tmp_path / "argv").read_text() == "serve --port 8080\n"


def test_a_killed_make_leaves_no_process(make: subprocess.Popen[str]) -> None:
    processes = descendants(make)
    make.kill()
    make.wait()
    wait_until_sync(lambda: have_ended(processes), GONE_S)


def test_ctrl_c_drains_and_a_second_one_ends_now(make: subprocess.Popen[str], tmp_path: Path) -> None:
    processes = descendants(make)
    (tmp_path / "hold").touch()
    os.killpg(make.pid, signal.SIGINT)
    wait_until_sync(lambda: "g0 terminated" in (tmp_path / "notes").read_text())
    assert not have_ended(processes)

    def has_ended() -> bool:
        if make.poll() is None:
            os.killpg(make.pid, signal.SIGINT)
        return make.poll() is not None

    wait_until_sync(has_ended, ONE_REQUEST_S + GONE_S)
    wait_until_sync(lambda: have_ended(processes), GONE_S)
