"""What a fork server starts is the process that the interpreter would start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.batchers import batcher
from tests.support.forks.client import ForkedProcess, can_fork
from tests.support.waiting import wait_until_sync

BATCHER = [sys.executable, "-P", "-m", "batcher"]


def test_a_forked_process_is_our_child_with_a_title_and_our_signals(broker: Broker) -> None:
    assert can_fork(BATCHER, os.environ)
    with batcher(broker.url, "b7") as process:
        child = psutil.Process(process.pid)
        assert child.ppid() == os.getpid()
        wait_until_sync(lambda: " ".join(child.cmdline()).strip() == "tokenfleet batcher b7")
        process.send_signal(signal.SIGSTOP)
        wait_until_sync(lambda: child.status() == psutil.STATUS_STOPPED)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def test_a_forked_process_has_the_given_variables_files_session_and_exit_code(tmp_path: Path) -> None:
    environ = os.environ | {"PROCESS_NAME": "b8", "MAX_BATCH_SIZE": "0"}
    forked = ForkedProcess(BATCHER, env=environ, stderr=subprocess.PIPE, start_new_session=True, cwd=tmp_path)
    assert os.getsid(forked.pid) == forked.pid
    started = subprocess.run(BATCHER, env=environ, capture_output=True)
    assert forked.communicate() == (None, started.stderr) and b"MAX_BATCH_SIZE" in started.stderr
    assert forked.returncode == started.returncode == os.EX_CONFIG
