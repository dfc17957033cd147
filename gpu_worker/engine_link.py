"""The engine process, and the agent's end of the door (gpu_worker/door.py)."""

import asyncio
import os
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable

from gpu_worker.door import LENGTH, Failure, Frame, Grant, Progress, Ready, Step, decode, encode
from gpu_worker.meter import Meter


class EngineDied(Exception):
    """The engine process ended."""


class EngineRefused(Exception):
    """The engine cannot serve with these settings; `setting` names the one at fault."""

    def __init__(self, setting: str, cause: str) -> None:
        self.setting, self.cause = setting, cause
        super().__init__(f"{setting}: {cause}")


class EngineLink:
    """One engine process. It dies with us, and we with it."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process, self.reader, self.writer = process, reader, writer
        self.meter = Meter()

    @classmethod
    async def start(cls, environ: dict[str, str]) -> "EngineLink":
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gpu_worker.engine", "--fd", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **environ, "PARENT_PID": str(os.getpid())},
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer)

    async def receive(self) -> Frame:
        """The next frame. Raises EngineDied when there is none any more, EngineRefused for a Failure that names a setting."""
        try:
            (size,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
            frame = decode(await self.reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EngineDied(f"engine process ended with {await self.process.wait()}") from error
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
        self.writer.write(encode(grant))
        self.meter.granted(grant, began_s)

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
