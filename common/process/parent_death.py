"""Parent death: kills this process when its parent ends.

A Python process calls `die_with_parent()`; other programs are run by
`python -m common.process.parent_death COMMAND …`. The variable PARENT_PID is the process id of the parent, so
a parent that ended before the call is noticed; 0 is for one started by hand, which follows nobody.
Without the variable it is the present parent. It is removed from the environment: children have another one.
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
    """Have this process killed (SIGKILL, even when it is stopped) as soon as its parent ends.

    On Linux the kernel does it, and the parent is the thread that started us: start children from a thread
    that stays. Elsewhere a thread polls.
    """
    parent_pid = int(os.environ.pop("PARENT_PID", os.getppid()))
    if parent_pid == 0:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=poll_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it ended before prctl
        os.kill(os.getpid(), signal.SIGKILL)


def poll_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def run(command: list[str]) -> int:
    """Replace this process by `command`, bound to our parent. Without prctl, run it as a child and poll."""
    parent_pid = int(os.environ.get("PARENT_PID", os.getppid()))
    if sys.platform == "linux":
        die_with_parent()
        os.execvp(command[0], command)
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: child.send_signal(got))
    while os.getppid() == parent_pid:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(POLL_S)
    child.kill()
    return 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
