"""The agent's side of the protocol (gpu_worker/protocol.py) with one rank, over a socket."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import cast

from gpu_worker.protocol import EngineFailure, Frame, FrameDecoder, ProtocolError, encode


class EngineLink(asyncio.Protocol):
    """Sends frames to a rank, and takes its frames as they come.

    A listener is called in the call that brings frames: to wake a task for them takes as long as all that an
    agent does with the tokens of a step.

    Attributes:
        frames: those that have come and were not taken. Bytes that are no frame become an EngineFailure.
        is_open: whether more may come.
        listener: what is called when frames have come, or the rank has closed its socket.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.decoder = FrameDecoder()
        self.frames: deque[Frame] = deque()
        self.is_open = True
        self.listener: Callable[[], None] | None = None

    @classmethod
    async def open(cls, channel: socket.socket) -> "EngineLink":
        _, link = await asyncio.get_running_loop().create_unix_connection(cls, sock=channel)
        return link

    def send(self, frame: Frame) -> None:
        self.transport.write(encode(frame))

    async def receive(self) -> Frame | None:
        """Return the next frame; None once the rank has closed its socket."""
        while not self.frames and self.is_open:
            arrived = asyncio.Event()
            self.listener = arrived.set
            try:
                await arrived.wait()
            finally:
                self.listener = None
        return self.frames.popleft() if self.frames else None

    def pop_frames(self) -> list[Frame]:
        """Return all frames that have come."""
        frames = [*self.frames]
        self.frames.clear()
        return frames

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self.decoder.feed(data)
            self.frames.extend(self.decoder)
        except ProtocolError as error:
            self.frames.append(EngineFailure("", str(error)))
        self.notify()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self.notify()

    def notify(self) -> None:
        if self.listener is not None:
            self.listener()
