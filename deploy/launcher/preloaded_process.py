"""Preloaded process: has done what a worker or gateway does before it knows its name, and waits to become the
next one that starts.

Until then it serves nobody and is no process of the fleet. When memory runs out, the kernel ends it first.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.messages.kept_answer import HANDLE_VARIABLE
from common.process.event_loop import run_until_one_ends
from common.process.launch import ACCEPTED, LOAD_FLAG, READY, encode_variables, shared_handles

log = logging.getLogger(__name__)

PROC = Path("/proc")
ENDS_FIRST = 1000
"""Highest `oom_score_adj`: the kernel ends such a process first when memory runs out."""
POLL_S = 0.5
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 3600.0
ACCEPT_TIMEOUT_S = 5.0
"""Less than a worker takes to start anew, but more than a busy machine lets a process wait."""

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
        self.writer.write(encode_variables(variables))
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
    that starts.

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

    async def keep_one_waiting(self, are_ready: Callable[[], Awaitable[bool]]) -> None:
        """Runs until it is cancelled; no process is left then."""
        retry_s = FIRST_RETRY_S
        try:
            while True:
                if not await are_ready():
                    await asyncio.sleep(POLL_S)
                    continue
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
        does not accept. One that still imports is used, too: it is further than one that only starts.
        """
        waiting, self.waiting = self.waiting, None
        if waiting is None:
            return None
        if await waiting.takes(variables):
            log.info("a preloaded %s takes the place, process %d", self.kind, waiting.process.pid)
            return waiting.process
        await waiting.kill()
        return None
