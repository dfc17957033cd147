"""Processes of a fleet: how one is started, ended and started again; and templates, of which they are copies.

A template (deploy/launcher/template.py) has imported what processes import, so a copy starts within
milliseconds and shares that memory. Once the fleet serves, a template also loads what a process has before it
knows its name: the next worker then serves at once. A copy is a child of the launcher, as if that had started
it. A template is no process of the fleet. When memory runs out, the kernel ends it first: copies live on, and
the next one has a new template.

Templates are Linux's only. Elsewhere, and when a template does not answer, the interpreter starts processes.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.messages.kept_answer import HANDLE_VARIABLE
from common.process.launch import ForkedProcess, shared_handles
from common.process.logs import new_incarnation
from deploy.launcher.template import DONE, FAILED, MAX_BYTES

log = logging.getLogger(__name__)

PROC = Path("/proc")
ENDS_FIRST = 1000
"""Highest `oom_score_adj`: the kernel ends such a process first when memory runs out."""
POLL_S = 0.5
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 3600.0
ANSWER_TIMEOUT_S = 5.0
"""Less than a worker takes to start anew, but more than a busy machine lets a process wait."""
PR_SET_CHILD_SUBREAPER = 36
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy starts none when it is imported: a copy would not have them."""
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
    command: Sequence[str], environ: Mapping[str, str], stdin: int, handles: Mapping[str, int]
) -> Process:
    """Start a process in a session of its own. Raises OSError.

    Args:
        environ: on top of our own environment.
        handles: variable → a file that the process inherits, and whose number is the variable's value.
    """
    inherited = [*shared_handles(environ), *handles.values()]
    numbers = {name: str(handle) for name, handle in handles.items()}
    return await asyncio.create_subprocess_exec(
        *command, env=os.environ | environ | numbers, pass_fds=inherited, stdin=stdin, start_new_session=True
    )


def kill_group(process: Process | ForkedProcess) -> None:
    """Kill what is left of a spawned process and of those that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


ADOPTING: list[None] = []
"""As many as there are copies being made."""


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Orphans below this process become its children meanwhile: so do copies, whose parent ends at once."""
    prctl = ctypes.CDLL(None).prctl
    ADOPTING.append(None)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        ADOPTING.pop()
        prctl(PR_SET_CHILD_SUBREAPER, len(ADOPTING) > 0, 0, 0, 0)


@dataclass(slots=True, eq=False)
class Template:
    """A template as the launcher sees it. It is started when it is first needed, and again after its end.

    Attributes:
        kind: that decides when there is time to load everything: `worker` or `gateway`.
        modules: kind of process → the module that it runs.
        environ: variables in addition to ours, with which it imports and loads.
        is_loading: whether it loads, and cannot copy itself.
    """

    kind: str
    modules: Mapping[str, str]
    environ: Mapping[str, str]
    process: Process | None = None
    channel: socket.socket = field(default_factory=socket.socket)
    is_loading: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def copy(
        self, kind: str, environ: Mapping[str, str], handles: Mapping[str, int]
    ) -> ForkedProcess | None:
        """Start a process; `environ` and `handles` as in `spawn`. Returns None if the template cannot."""
        if self.is_loading:  # nothing can raise its priority before it is done
            await self.end()
        start = {"module": self.modules[kind], "environ": os.environ | environ, "handles": [*handles]}
        async with self.lock:
            answer = await self.ask(start, handles.values(), ANSWER_TIMEOUT_S)
            if not answer.isdigit():
                await self.end()
                return None
            score_memory(int(answer), memory_score())
            return ForkedProcess(int(answer))

    async def keep_loaded(
        self, are_ready: Question, is_busy: Question, has_memory: Callable[[], bool]
    ) -> None:
        """Load everything whenever there is a template without it, memory, and time: all processes of its
        kind are ready, and no requests run, or have run for BUSY_S. Never returns.
        """
        retry_s = FIRST_RETRY_S
        while True:
            await wait_for_time(are_ready, is_busy)
            if not has_memory():
                log.info("no %s is preloaded: memory is short", self.kind)
            elif (process := await self.load()) is not None:
                log.info("a preloaded %s waits: process %d", self.kind, process.pid)
                retry_s = FIRST_RETRY_S
                await process.wait()
                if self.process is process:
                    log.warning("the preloaded %s ended with %s", self.kind, process.returncode)
                continue
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def load(self) -> Process | None:
        """Have the template load everything. Returns its process; None if it has ended instead."""
        async with self.lock:
            self.is_loading = True
            try:
                return self.process if await self.ask({}, (), None) == DONE else None
            finally:
                self.is_loading = False

    async def ask(self, message: Mapping[str, Any], files: Collection[int], timeout_s: float | None) -> bytes:
        """Send a message to the template, which is started if there is none. Returns the answer; FAILED, if
        there is none in time after it has imported its modules.
        """
        try:
            await self.begin()
            with adopting_orphans() if message else contextlib.nullcontext():
                socket.send_fds(self.channel, [json.dumps(message).encode()], [*files])
                async with asyncio.timeout(timeout_s):
                    return await self.receive() or FAILED
        except (OSError, TimeoutError) as error:
            log.warning("the template of a %s does not answer: %r", self.kind, error)
            return FAILED

    async def receive(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.channel, MAX_BYTES)

    async def begin(self) -> None:
        """Start the process, if there is none, and wait for its imports. Raises OSError."""
        if self.process is not None and self.process.returncode is None:
            return
        self.channel.close()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setblocking(False)
        with theirs:
            words = [sys.executable, "-P", "-m", "deploy.launcher.template", self.kind]
            environ = {**self.environ, "PARENT_PID": str(os.getpid()), **NO_THREADS}
            words += self.modules.values()
            self.process = await spawn(words, environ, theirs.fileno(), {})
        score_memory(self.process.pid, ENDS_FIRST)
        if await self.receive() != DONE:
            raise OSError("it ended while it imported")

    async def renew(self, environ: Mapping[str, str]) -> None:
        """End the process; the next one reads files anew and has these variables."""
        self.environ = environ
        await self.end()

    async def end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            kill_group(process)
            await process.wait()


async def wait_for_time(are_ready: Question, is_busy: Question) -> None:
    """Wait until all are ready, and then for idleness, up to BUSY_S: some fleets are never idle."""
    busy_s = 0.0
    while not (ready := await are_ready()) or (busy_s < BUSY_S and await is_busy()):
        busy_s = busy_s + POLL_S if ready else 0.0
        await asyncio.sleep(POLL_S)


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
        kind: `broker`, `batcher`, `worker` or `gateway`.
        environ: variables in addition to ours.
        incarnation: name of this run, new at every start. A worker may go on under a next one.
        template: of which it is a copy; None: the interpreter starts it.
        should_run: whether to start it again when it ends.
        stop_signal: asks it to end.
        open_channel: makes a channel for one run of a gateway to the socket keeper.
    """

    kind: str
    name: str
    command: Sequence[str]
    environ: dict[str, str]
    template: Template | None = None
    should_run: bool = True
    stop_signal: signal.Signals = signal.SIGTERM
    incarnation: str = ""
    running: Process | ForkedProcess | None = None
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
            self.running = await self.start(variables)
        except OSError as error:  # such as no memory: the next try may succeed
            log.error("%s does not start: %s", self.name, error)
            return os.EX_OSERR, clock() - started_s
        if not self.should_run:
            self.send(self.stop_signal)
        returncode = await self.running.wait()
        kill_group(self.running)  # processes that it has left running
        return returncode, clock() - started_s

    async def start(self, environ: Mapping[str, str]) -> Process | ForkedProcess:
        """Start it, a gateway with its end of a channel to the socket keeper. Raises OSError."""
        with self.open_channel() if self.open_channel else contextlib.nullcontext() as channel:
            handles = {HANDLE_VARIABLE: channel.fileno()} if channel else {}
            copy = await self.template.copy(self.kind, environ, handles) if self.template else None
            return copy or await spawn(self.command, environ, DEVNULL, handles)

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
