"""A process that must not outlive its parent: `die_with_parent()`, or `python -m common.process.parent_death
COMMAND …` for one that is not Python.

The variable PARENT_PID says whose life is followed: the process id of the parent, so that a parent that died
before we looked is noticed; 0 for nobody (a process that a person started by hand); without it, whoever is
the parent now. It is taken out of the environment: it is not meant for grandchildren.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

POLL_S = 0.5
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on this process is killed (SIGKILL, even when it is stopped) as soon as its parent ends.

    On Linux the kernel does it, and "parent" is the thread that started us: start children from a thread that
    stays. Elsewhere a thread watches.
    """
    parent_pid = int(os.environ.pop("PARENT_PID", os.getppid()))
    if parent_pid == 0:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=watch, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def run(command: list[str]) -> int:
    """Becomes `command`, bound to our parent; where the kernel cannot bind it, stays and watches it."""
    parent_pid = int(os.environ.get("PARENT_PID", os.getppid()))
    if sys.platform == "linux":
        die_with_parent()
        os.execvp(command[0], command)
    child = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    while os.getppid() == parent_pid:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(POLL_S)
    child.kill()
    return 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
