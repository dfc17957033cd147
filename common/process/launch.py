"""Launch: how a process of a fleet is bound to its launcher.

It is killed when its parent ends. A Python process calls `die_with_parent()`; other programs are run by
`python -m common.process.launch COMMAND …`. The variable PARENT_PID is the process id of the parent, so a
parent that ended before the call is noticed; 0 is for one started by hand, which follows nobody. Without the
variable it is the present parent. It is removed from the environment: children have another one.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
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


WEIGHTS_VARIABLE = "WEIGHT_STORE"
"""Names the file descriptor, which engines inherit, of the memory that they share."""


def shared_handles(environ: Mapping[str, str]) -> list[int]:
    """Return the file descriptor that WEIGHTS_VARIABLE names, which a child process inherits; or nothing."""
    handle = environ.get(WEIGHTS_VARIABLE)
    return [int(handle)] if handle else []


class ForkedProcess:
    """A child that was not started by asyncio: what is needed of the interface of its `Process` (Linux)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ended = asyncio.Event()
        handle = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(handle, self.reap, handle)

    def reap(self, handle: int) -> None:
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.ended.set()

    async def wait(self) -> int:
        await self.ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == [KEEP_FLAG]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # exec keeps the mask
    sys.exit(run(words[words[:1] == [KEEP_FLAG] :]))
