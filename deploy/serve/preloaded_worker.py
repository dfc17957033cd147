"""Preloaded worker: a process that has imported what workers need, and loaded the model where memory allows.
It waits to become the next worker that starts; it serves nobody before, and is no worker of the fleet.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common.process import memory
from common.process.preload import ACCEPTED, FLAG, LOAD_FLAG, READY, encode_variables
from common.settings.settings import Settings
from deploy.serve import checks

log = logging.getLogger(__name__)

RANK_BYTES = 512 * 2**20
"""What an engine's process with torch and transformers takes, a little more than was measured."""
POLL_S = 0.5
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 3600.0
ANSWER_S = 1.0


def choose_flags(settings: Settings, worker_bytes: int) -> list[str]:
    """How a worker is preloaded: with its model, where that is on CPU and of one rank and leaves memory, or
    without; not at all where even that does not, unless PRELOAD_WORKER demands it.

    Attributes:
        worker_bytes: what a worker takes that has loaded the model.
    """
    num_ranks = settings.num_shard or 1
    may_load = num_ranks == 1 and not checks.caches_on_gpu(settings)
    if may_load and fits_in_memory(settings, max(worker_bytes, RANK_BYTES)):
        return [FLAG, LOAD_FLAG]
    return [FLAG] if settings.preload_worker or fits_in_memory(settings, num_ranks * RANK_BYTES) else []


def fits_in_memory(settings: Settings, taken_bytes: int) -> bool:
    """Whether so much leaves memory for all caches, and as much again. Caches on CPU take their pages as they
    are used.
    """
    caches_bytes = 0 if checks.caches_on_gpu(settings) else settings.num_workers * settings.cpu_cache_bytes
    return memory.available_bytes() - caches_bytes >= 2 * taken_bytes


@dataclass(slots=True)
class WaitingProcess:
    """A process that imports, or has imported, and the socket to it. `taken`: it has become a worker, or has
    to make way for one.
    """

    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_ready: bool = False
    taken: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def start(cls, command: Sequence[str], environ: Mapping[str, str]) -> "WaitingProcess":
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, env=environ, stdin=theirs.fileno(), start_new_session=True
                )
            except OSError:
                ours.close()
                raise
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    async def says(self, words: bytes) -> bool:
        """Wait for the next line. Returns whether it is this one; not, when the process ends instead."""
        try:
            return await self.reader.readline() == words
        except OSError:
            return False

    async def accepts(self, variables: Mapping[str, str]) -> bool:
        """Give the process its place in the fleet. Returns False when it does not take it in time."""
        try:
            async with asyncio.timeout(ANSWER_S):
                self.writer.write(encode_variables(variables))
                return await self.says(ACCEPTED)
        except (TimeoutError, OSError):
            return False

    async def until_taken_or_ended(self) -> None:
        waits = [asyncio.create_task(self.taken.wait()), asyncio.create_task(self.process.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def end(self) -> None:
        """End the process now, with those that it has started."""
        self.writer.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


class PreloadedWorker:
    """Keeps one process waiting, from when all workers are ready, and again when that one was used or has
    ended: it would take processor time from a worker that loads.

    Attributes:
        command, environ: of a worker without its name.
        waiting: the process; None without one.
    """

    def __init__(self, settings: Settings, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.settings = settings
        self.command = command
        self.environ = environ
        self.waiting: WaitingProcess | None = None

    async def keep(
        self, workers_are_ready: Callable[[], Awaitable[bool]], worker_bytes: Callable[[], int]
    ) -> None:
        """Never returns; no process is left when it is cancelled."""
        retry_s = FIRST_RETRY_S
        try:
            while True:
                if not await workers_are_ready():
                    await asyncio.sleep(POLL_S)
                    continue
                flags = choose_flags(self.settings, worker_bytes())
                if not flags:
                    log.info("no worker is preloaded: memory is short (PRELOAD_WORKER)")
                elif await self.wait_until_taken(flags):
                    retry_s = FIRST_RETRY_S
                    continue
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
        finally:
            if self.waiting is not None:
                await self.waiting.end()

    async def wait_until_taken(self, flags: Sequence[str]) -> bool:
        """Start a process, and return when it was taken; False when it ended by itself."""
        environ = os.environ | self.environ | {"PARENT_PID": str(os.getpid())}
        try:
            waiting = self.waiting = await WaitingProcess.start([*self.command, *flags], environ)
        except OSError as error:
            log.warning("no worker is preloaded: %s", error)
            return False
        waiting.is_ready = await waiting.says(READY)
        if waiting.is_ready:
            what = "with its model" if LOAD_FLAG in flags else "without its model"
            log.info("a preloaded worker waits %s, process %d", what, waiting.process.pid)
            await waiting.until_taken_or_ended()
        if waiting.taken.is_set():
            return True
        self.waiting = None
        await waiting.end()
        log.warning("the preloaded worker ended with %s", waiting.process.returncode)
        return False

    async def become(self, variables: Mapping[str, str]) -> Process | None:
        """The waiting process, which is a worker with these variables from here on; None where none waits or
        takes them. A process that still imports is ended, so that it takes nothing from the worker.
        """
        waiting, self.waiting = self.waiting, None
        if waiting is None:
            return None
        waiting.taken.set()
        if waiting.is_ready and await waiting.accepts(variables):
            waiting.writer.close()
            log.info("a preloaded worker takes the place, process %d", waiting.process.pid)
            return waiting.process
        await waiting.end()
        return None
