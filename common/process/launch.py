"""Launch: how a process of a fleet is bound to its launcher.

It is killed when its parent ends. A Python process calls `die_with_parent()`; other programs are run by
`python -m common.process.launch COMMAND …`. The variable PARENT_PID is the process id of the parent, so a
parent that ended before the call is noticed; 0 is for one started by hand, which follows nobody. Without the
variable it is the present parent. It is removed from the environment: children have another one.

A process may wait to be used, with all imported that it needs. It has a socket to the launcher as its
standard input. It says READY when it has imported everything, and with LOAD_FLAG has loaded the model; the
launcher then sends the variables that make it one process of the fleet, and it answers ACCEPTED.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

POLL_S = 0.5
PR_SET_PDEATHSIG = 1
KEEP_FLAG = "--keep"
"""The command gets no SIGTERM. A machine that shuts down sends it to all processes at once, but requests in
flight need the broker until they are finished: the launcher ends that last, by SIGINT.
"""


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


PRELOAD_FLAG = "--preload"
LOAD_FLAG = "--load"
WEIGHTS_VARIABLE = "WEIGHT_STORE"
"""Names the file descriptor, which engines inherit, of the memory that they share."""
READY = b"ready\n"
ACCEPTED = b"accepted\n"


def shared_handles(environ: Mapping[str, str]) -> list[int]:
    """Return the file descriptor that WEIGHTS_VARIABLE names, which a child process inherits; or nothing."""
    handle = environ.get(WEIGHTS_VARIABLE)
    return [int(handle)] if handle else []


def wait_for_place() -> None:
    """Say READY, and return when this process has its place in the fleet: its variables are in the
    environment then. Exits when the launcher ends before.
    """
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as launcher:
        launcher.sendall(READY)
        line = launcher.makefile("rb").readline()
        if not line:
            sys.exit(0)
        os.environ.update(json.loads(line))
        launcher.sendall(ACCEPTED)


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == [KEEP_FLAG]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # exec keeps the mask
    sys.exit(run(words[words[:1] == [KEEP_FLAG] :]))
