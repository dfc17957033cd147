"""Run delay of real processes."""

import os
import subprocess
import sys

from common.process.machine import run_delay_s
from tests.support.waiting import wait_until_sync

BUSY = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"


def test_a_process_that_shares_its_core_waits_for_it() -> None:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(3)]
    try:
        wait_until_sync(lambda: run_delay_s(processes[0].pid) > 0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_process_that_has_ended_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert run_delay_s(process.pid) == 0.0
    assert run_delay_s(os.getpid()) >= 0.0
