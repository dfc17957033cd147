"""The engine processes, and the agent's end of the door (gpu_worker/door.py)."""

import asyncio
import os
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_worker.door import LENGTH, Failure, Frame, Grant, Progress, Ready, Step, decode, encode
from gpu_worker.meter import Meter
from gpu_worker.place import Place


class EngineDied(Exception):
    """A process of the engine ended."""


class EngineRefused(Exception):
    """The engine cannot serve with these settings; `setting` names the one at fault."""

    def __init__(self, setting: str, cause: str) -> None:
        self.setting, self.cause = setting, cause
        super().__init__(f"{setting}: {cause}")


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of the engine."""

    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, place: Place, environ: dict[str, str]) -> "Rank":
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "gpu_worker.engine", "--fd", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **environ, **place.environ(), "PARENT_PID": str(os.getpid())},
            )
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    async def receive(self) -> Frame | None:
        """The next frame; None when there is none any more."""
        try:
            (size,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
            return decode(await self.reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()


class EngineLink:
    """The engine: a process for each rank, of which rank 0 speaks for all. They die with us and with each other, and we with them.

    Attributes:
        token_ms: time of one prompt token, as warm-up found.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self.meter = Meter()
        self.token_ms = 0.0
        self.failure: Failure | None = None
        self.watches = [asyncio.create_task(self.watch(number)) for number in range(1, len(ranks))]

    @classmethod
    async def start(cls, environ: dict[str, str], places: Sequence[Place]) -> "EngineLink":
        return cls([await Rank.start(place, environ) for place in places])

    async def watch(self, number: int) -> None:
        """The end of one rank is the end of all. Ranks above 0 say no more than why they failed."""
        frame = await self.ranks[number].receive()
        self.failure = frame if isinstance(frame, Failure) else await self.end_of(number)
        self.kill()

    async def end_of(self, number: int) -> Failure:
        return Failure("", f"the process of rank {number} ended with {await self.ranks[number].process.wait()}")

    async def receive(self) -> Frame:
        """The next frame. Raises EngineDied when there is none any more, EngineRefused for a Failure that names a setting."""
        frame = await self.ranks[0].receive() or self.failure or await self.end_of(0)
        if isinstance(frame, Failure):
            if frame.setting:
                raise EngineRefused(frame.setting, frame.cause)
            raise EngineDied(f"engine failed: {frame.cause}")
        return frame

    async def ready(self, progress: Callable[[str], None]) -> Ready:
        """Waits for the warm-up; `progress` gets what the engine says meanwhile. Returns its capacity."""
        while True:
            match await self.receive():
                case Progress(text):
                    progress(text)
                case Ready() as ready:
                    self.token_ms = ready.token_ms
                    return ready
                case other:
                    raise EngineDied(f"engine spoke out of turn: {other}")

    async def step(self) -> Step:
        """The next completed step."""
        self.meter.waits()
        try:
            frame = await self.receive()
        except EngineDied:
            self.meter.failed()
            raise
        if not isinstance(frame, Step):
            raise EngineDied(f"engine spoke out of turn: {frame}")
        self.meter.took(frame)
        return frame

    def send(self, grant: Grant) -> None:
        began_s = time.perf_counter()
        self.ranks[0].writer.write(encode(grant))
        self.meter.granted(grant, began_s)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
