"""The engine processes, and the agent's end of the door (gpu_worker/protocol.py)."""

import asyncio
import os
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gpu_worker.agent.metrics import BatchMetrics
from gpu_worker.protocol import (
    EngineFailure,
    Frame,
    FrameDecoder,
    Grant,
    LoadProgress,
    ProtocolError,
    Ready,
    StepResult,
    encode,
)
from gpu_worker.rank import Place

RECEIVE_BYTES = 2**16


class EngineDied(Exception):
    """A process of the engine ended."""


class EngineRefused(Exception):
    """The engine cannot serve with these settings; `setting` names the one at fault."""

    def __init__(self, setting: str, cause: str) -> None:
        self.setting, self.cause = setting, cause
        super().__init__(f"{setting}: {cause}")


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One process of the engine."""

    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    frames: FrameDecoder = field(default_factory=FrameDecoder)

    @classmethod
    async def start(cls, place: Place, environ: dict[str, str]) -> "RankProcess":
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
            while (frame := next(self.here(), None)) is None:
                data = await self.reader.read(RECEIVE_BYTES)
                if not data:
                    return None
                self.frames.feed(data)
        except ConnectionError:
            return None
        except ProtocolError as error:
            return unreadable_failure(error)
        return frame

    def here(self) -> Iterator[Frame]:
        """Frames that have come."""
        try:
            yield from self.frames
        except ProtocolError as error:
            yield unreadable_failure(error)

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()


def unreadable_failure(error: ProtocolError) -> EngineFailure:
    """What an engine says that cannot be read is as good as its failure."""
    return EngineFailure("", f"at the door: {error}")


def raise_on_failure(frame: Frame) -> Frame:
    """Raises EngineDied for a Failure, EngineRefused for one that names a setting."""
    if isinstance(frame, EngineFailure):
        raise (
            EngineRefused(frame.setting, frame.cause)
            if frame.setting
            else EngineDied(f"engine failed: {frame.cause}")
        )
    return frame


def require_step(frame: Frame) -> StepResult:
    """Raises EngineDied for any other."""
    frame = raise_on_failure(frame)
    if not isinstance(frame, StepResult):
        raise EngineDied(f"engine spoke out of turn: {frame}")
    return frame


class EngineClient:
    """The engine: a process for each rank, of which rank 0 speaks for all. They die with us and with each
    other, and we with them.

    Attributes:
        token_ms: time of one prompt token, as warm-up found.
    """

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self.ranks = ranks
        self.meter = BatchMetrics()
        self.token_ms = 0.0
        self.failure: EngineFailure | None = None
        self.watches = [asyncio.create_task(self.watch(number)) for number in range(1, len(ranks))]

    @classmethod
    async def start(cls, environ: dict[str, str], places: Sequence[Place]) -> "EngineClient":
        return cls([await RankProcess.start(place, environ) for place in places])

    async def watch(self, number: int) -> None:
        """The end of one rank is the end of all. Ranks above 0 say no more than why they failed."""
        frame = await self.ranks[number].receive()
        self.failure = frame if isinstance(frame, EngineFailure) else await self.end_of(number)
        self.kill()

    async def end_of(self, number: int) -> EngineFailure:
        return EngineFailure(
            "", f"the process of rank {number} ended with {await self.ranks[number].process.wait()}"
        )

    async def receive(self) -> Frame:
        """The next frame. Raises EngineDied when there is none any more, and as `heard` does."""
        return raise_on_failure(await self.ranks[0].receive() or self.failure or await self.end_of(0))

    async def ready(self, progress: Callable[[str], None]) -> Ready:
        """Waits for the warm-up; `progress` gets what the engine says meanwhile. Returns its capacity."""
        while True:
            match await self.receive():
                case LoadProgress(text):
                    progress(text)
                case Ready() as ready:
                    self.token_ms = ready.token_ms
                    return ready
                case other:
                    raise EngineDied(f"engine spoke out of turn: {other}")

    async def steps(self) -> Sequence[StepResult]:
        """The steps that were completed since the last call, at least one."""
        self.meter.waits()
        try:
            steps = [require_step(await self.receive()), *map(require_step, self.ranks[0].here())]
        except EngineDied:
            self.meter.failed()
            raise
        self.meter.took(steps)
        return steps

    def send(self, grant: Grant) -> None:
        began_s = time.perf_counter()
        self.ranks[0].writer.write(encode(grant))
        self.meter.granted(grant, began_s)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
