"""Processes of a fleet: how one is started, ended and started again, and one that waits, preloaded, to become
the next.

A preloaded process has done what a worker or gateway does before it knows its name. It serves nobody, and is
no process of the fleet. When memory runs out, the kernel ends it first.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.messages.kept_answer import HANDLE_VARIABLE
from common.process.event_loop import run_until_one_ends
from common.process.launch import ACCEPTED, LOAD_FLAG, READY, shared_handles
from common.process.logs import new_incarnation

log = logging.getLogger(__name__)

PROC = Path("/proc")
ENDS_FIRST = 1000
"""Highest `oom_score_adj`: the kernel ends such a process first when memory runs out."""
POLL_S = 0.5
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 3600.0
ACCEPT_TIMEOUT_S = 5.0
"""Less than a worker takes to start anew, but more than a busy machine lets a process wait."""

BUSY_S = 20.0
"""Longer than most requests run."""

Question = Callable[[], Awaitable[bool]]
OpenChannel = Callable[[], socket.socket]
"""Makes a channel for one run of a gateway to the socket keeper."""


def family(pid: int | None) -> Iterator[int]:
    """Yield the process ids of a process and all that it has started (such as a worker's engine), its own
    first. None yields nothing.
    """
    if pid is None:
        return
    yield pid
    children = b""
    with contextlib.suppress(OSError):  # it has ended, or the kernel does not list children
        children = (PROC / str(pid) / "task" / str(pid) / "children").read_bytes()
    for child in children.split():
        yield from family(int(child))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it is not known."""
    with contextlib.suppress(OSError):
        pages = (PROC / str(pid) / "statm").read_bytes().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return 0


def memory_score() -> int:
    """Our own `oom_score_adj`, which child processes inherit."""
    with contextlib.suppress(OSError):
        return int((PROC / "self" / "oom_score_adj").read_text())
    return 0


def score_memory(pid: int, score: int) -> None:
    """Set `oom_score_adj` (Linux only) of a process and of all that it has started or will start."""
    for member in family(pid):
        with contextlib.suppress(OSError):
            (PROC / str(member) / "oom_score_adj").write_text(str(score))


async def spawn(
    command: Sequence[str], environ: Mapping[str, str], stdin: int, open_channel: OpenChannel | None
) -> Process:
    """Start a process in a session of its own; a gateway gets its end of a channel to the socket keeper.
    `environ` comes on top of our own environment. Raises OSError.
    """
    with open_channel() if open_channel else contextlib.nullcontext() as channel:
        handles = [*shared_handles(environ), *([channel.fileno()] if channel else [])]
        own = {HANDLE_VARIABLE: str(channel.fileno())} if channel else {}
        return await asyncio.create_subprocess_exec(
            *command, env=os.environ | environ | own, pass_fds=handles, stdin=stdin, start_new_session=True
        )


def kill_group(process: Process) -> None:
    """Kill what is left of a spawned process and of those that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@dataclass(slots=True)
class WaitingProcess:
    """A process that imports or has imported its modules, and the socket to it.

    Attributes:
        is_ready: whether it has finished importing, and loading if it was told to.
        taken: set when it was given a place in the fleet.
    """

    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_ready: bool = False
    taken: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def start(
        cls, command: Sequence[str], environ: Mapping[str, str], open_channel: OpenChannel | None
    ) -> "WaitingProcess":
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await spawn(command, environ, theirs.fileno(), open_channel)
            except OSError:
                ours.close()
                raise
        score_memory(process.pid, ENDS_FIRST)
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    async def says(self, words: bytes) -> bool:
        """Wait for the next line. Returns whether it is this one; False, too, if the process ends instead."""
        try:
            return await self.reader.readline() == words
        except OSError:
            return False

    async def takes(self, variables: Mapping[str, str]) -> bool:
        """Give the process its place in the fleet. Returns False if it is ready and does not accept in time.
        A process that still imports accepts later.
        """
        self.taken.set()
        score_memory(self.process.pid, memory_score())
        self.writer.write(json.dumps({**variables}).encode() + b"\n")
        if not self.is_ready:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                return await self.accepts()
        return False

    async def accepts(self) -> bool:
        """Wait until it has accepted its place; it then hears no more from us. Returns False if it ends."""
        accepted = await self.says(ACCEPTED)
        self.writer.close()
        return accepted

    async def kill(self) -> None:
        """End the process now, with those that it has started."""
        self.writer.close()
        kill_group(self.process)
        await self.process.wait()


@dataclass(slots=True, eq=False)
class PreloadedProcess:
    """Keeps one process of a kind waiting, and starts another when it was used or has ended.

    It starts one only while all processes of its kind are ready, since it would take processor time from one
    that starts. It lets requests that run go first, up to BUSY_S: a fleet that is never idle has one, too.

    Attributes:
        kind: `worker` or `gateway`.
        command, environ: of such a process, without its name.
        choose_flags: chooses flags for the command by the memory that is left. No flags: none is started.
        open_channel: opens the channel of a gateway to the socket keeper.
        waiting: the process that waits.
    """

    kind: str
    command: Sequence[str]
    environ: Mapping[str, str]
    choose_flags: Callable[[], list[str]]
    open_channel: OpenChannel | None = None
    waiting: WaitingProcess | None = None

    async def keep_one_waiting(self, are_ready: Question, is_busy: Question) -> None:
        """Runs until it is cancelled; no process is left then."""
        retry_s, busy_s = FIRST_RETRY_S, 0.0
        try:
            while True:
                if not (ready := await are_ready()) or (busy_s < BUSY_S and await is_busy()):
                    busy_s = busy_s + POLL_S if ready else 0.0
                    await asyncio.sleep(POLL_S)
                    continue
                busy_s = 0.0
                flags = self.choose_flags()
                if not flags:
                    log.info("no %s is preloaded: memory is short", self.kind)
                elif await self.wait_until_taken(flags):
                    retry_s = FIRST_RETRY_S
                    continue
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
        finally:
            if self.waiting is not None:
                await self.waiting.kill()

    async def wait_until_taken(self, flags: Sequence[str]) -> bool:
        """Start a process, and wait until it was taken, or ended to be renewed. Returns False if it ends by
        itself.
        """
        command = [*self.command, *flags]
        environ = {**self.environ, "PARENT_PID": str(os.getpid())}
        try:
            waiting = self.waiting = await WaitingProcess.start(command, environ, self.open_channel)
        except OSError as error:
            log.warning("no %s is preloaded: %s", self.kind, error)
            return False
        waiting.is_ready = await waiting.says(READY)
        if waiting.taken.is_set():  # while it imported
            await waiting.accepts()
        elif waiting.is_ready:
            how = ", its model loaded" if LOAD_FLAG in flags else ""
            log.info("a preloaded %s waits%s: process %d", self.kind, how, waiting.process.pid)
            await run_until_one_ends(waiting.taken.wait(), waiting.process.wait())
        if waiting.taken.is_set() or self.waiting is not waiting:
            return True
        self.waiting = None
        await waiting.kill()
        log.warning("the preloaded %s ended with %s", self.kind, waiting.process.returncode)
        return False

    async def renew(self, changed: Mapping[str, str]) -> None:
        """End the waiting process; the next one reads files anew and has these variables changed."""
        self.environ = {**self.environ, **changed}
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            await waiting.kill()

    async def become(self, variables: Mapping[str, str]) -> Process | None:
        """Give the waiting process its place, with these variables, and return it. None: none waits, or it
        does not accept. A gateway that still imports is used, too: it is further than one that only starts. A
        worker's engine is not: nothing can raise its priority before it is loaded.
        """
        waiting, self.waiting = self.waiting, None
        if waiting is None:
            return None
        if (waiting.is_ready or self.kind == "gateway") and await waiting.takes(variables):
            log.info("a preloaded %s takes the place, process %d", self.kind, waiting.process.pid)
            return waiting.process
        await waiting.kill()
        return None


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

    async def end(self, timeout_s: float) -> None:
        """Ask the process to end, wait up to `timeout_s`, and kill what is left; without a time, kill it."""
        running = self.running
        if timeout_s:
            self.send(self.stop_signal)
        for wait_s in (timeout_s, KILL_TIMEOUT_S):
            if running is None or running.returncode is not None:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await running.wait()
                return
            kill_group(running)


async def stop(processes: Sequence[SupervisedProcess], timeout_s: float) -> None:
    """End the processes, each within `timeout_s`. None of them starts again."""
    for process in processes:
        process.should_run = False
    await asyncio.gather(*(process.end(timeout_s) for process in processes))
