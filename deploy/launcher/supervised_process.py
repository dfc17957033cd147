"""Supervised process: one process of the fleet, how it is started and ended, and when it restarts."""

import asyncio
import contextlib
import logging
import os
import signal
from asyncio.subprocess import DEVNULL
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.process.logs import new_incarnation
from deploy.launcher.preloaded_process import OpenChannel, PreloadedProcess, kill_group, spawn

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 10.0
SHORT_LIFE_S = 5.0
KILL_TIMEOUT_S = 3.0


@dataclass(slots=True)
class Restarts:
    """Decides when a process that ended starts again: at once the first time, then 0.5, 1, 2 … 10 s after its
    last start. After a run of SHORT_LIFE_S or more it restarts at once again.
    """

    num_short_lives: int = 0

    def pause_s(self, lived_s: float) -> float:
        if lived_s >= SHORT_LIFE_S:
            self.num_short_lives = 0
            return 0.0
        since_start_s = FIRST_PAUSE_S * 2 ** (self.num_short_lives - 1) if self.num_short_lives else 0.0
        self.num_short_lives += 1
        return max(0.0, min(since_start_s, LAST_PAUSE_S) - lived_s)


def describe(returncode: int) -> str:
    """Say how a process ended. A negative code is a signal's number, as in `subprocess`."""
    if returncode == os.EX_CONFIG:
        return f"exit code {returncode}, for the setting named above"
    if returncode >= 0:
        return f"exit code {returncode}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-returncode).name}"
    return f"killed by signal {-returncode}"


@dataclass(slots=True)
class SupervisedProcess:
    """A process of the fleet. It dies with us, and leads a session of its own: a terminal's Ctrl-C does not
    reach it.

    Attributes:
        kind: `broker`, `batcher`, `worker`, `gateway` or `jobs`.
        environ: variables in addition to ours.
        incarnation: name of this run, new at every start. A worker may go on under a next one.
        preloaded: keeps a process waiting that may become this one.
        should_run: whether to start it again when it ends.
        stop_signal: asks it to end.
        open_channel: makes a channel for one run of a gateway to the socket keeper.
    """

    kind: str
    name: str
    command: Sequence[str]
    environ: dict[str, str]
    preloaded: PreloadedProcess | None = None
    should_run: bool = True
    stop_signal: signal.Signals = signal.SIGTERM
    incarnation: str = ""
    running: asyncio.subprocess.Process | None = None
    restarts: Restarts = field(default_factory=Restarts)
    open_channel: OpenChannel | None = None

    async def run_once(self) -> tuple[int, float]:
        """Run the process once. Returns its return code, and the seconds that it ran."""
        self.incarnation = new_incarnation(self.name)
        own = {"PROCESS_NAME": self.name, "INCARNATION": self.incarnation, "PARENT_PID": str(os.getpid())}
        clock = asyncio.get_running_loop().time
        started_s = clock()
        variables = self.environ | own
        try:
            preloaded = await self.preloaded.become(variables) if self.preloaded else None
            self.running = preloaded or await spawn(self.command, variables, DEVNULL, self.open_channel)
        except OSError as error:  # such as no memory: the next try may succeed
            log.error("%s does not start: %s", self.name, error)
            return os.EX_OSERR, clock() - started_s
        if not self.should_run:
            self.send(self.stop_signal)
        returncode = await self.running.wait()
        kill_group(self.running)  # processes that it has left running
        return returncode, clock() - started_s

    @property
    def pid(self) -> int | None:
        """The process id; None while it does not run."""
        return self.running.pid if self.running and self.running.returncode is None else None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it runs. `running.send_signal` would reap a process that has just ended, and
        asyncio complains about that.
        """
        if (pid := self.pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill the process and all that it has started."""
        if self.running and self.pid:
            kill_group(self.running)


async def stop(processes: Sequence[SupervisedProcess], timeout_s: float) -> None:
    """Ask the processes to end, wait up to `timeout_s`, and kill the rest. None of them starts again."""
    for process in processes:
        process.should_run = False
        process.send(process.stop_signal)
    await wait_for_ends(processes, timeout_s)
    await kill(processes)


async def kill(processes: Sequence[SupervisedProcess]) -> None:
    """Kill the processes. None of them starts again."""
    for process in processes:
        process.should_run = False
        process.kill()
    await wait_for_ends(processes, KILL_TIMEOUT_S)


async def wait_for_ends(processes: Sequence[SupervisedProcess], timeout_s: float) -> None:
    ends = [asyncio.create_task(process.running.wait()) for process in processes if process.running]
    if ends:
        await asyncio.wait(ends, timeout=timeout_s)
