"""The engine's side of the protocol (gpu_worker/protocol.py). It imports no torch, so that an engine can
report to its agent before it has imported the rest.
"""

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from typing import TypeVar

from gpu_worker.protocol import (
    Command,
    End,
    Frame,
    FrameDecoder,
    ModelSleeps,
    PeerClosed,
    Sleep,
    WorkerEnds,
    encode,
)

Received = TypeVar("Received", bound=Frame)

RECEIVE_BYTES = 2**18


class AgentLink:
    """Sends and receives frames over a blocking socket: an engine that is too far ahead of its agent waits in
    `send`.

    Attributes:
        sending: held while a frame is sent; the thread that learns of a lost rank may send one.
        woken, waker: the two ends of a pipe; a byte in it ends the wait for grants.
    """

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(True)
        self.channel = channel
        self.frames = FrameDecoder()
        self.sending = threading.Lock()
        woken, waker = socket.socketpair()
        woken.setblocking(False)
        waker.setblocking(False)
        self.woken = woken
        self.waker = waker

    def send(self, frame: Frame) -> None:
        """Raises PeerClosed."""
        try:
            with self.sending:
                self.channel.sendall(encode(frame))
        except ConnectionError as error:
            raise PeerClosed from error

    def wake(self) -> None:
        """End the wait for grants, or the next wait if none has begun. Any thread may call it."""
        with contextlib.suppress(BlockingIOError):  # a full pipe ends the wait, too
            self.waker.send(b"\0")

    def commands(self, wait_s: float) -> Iterator[Command]:
        """Yield all commands that have arrived, in order. Wait for the first up to `wait_s`, or until `wake`
        is called. Raises PeerClosed, WorkerEnds, ModelSleeps.
        """
        while self.read(wait_s):
            for frame in self.frames:
                wait_s = 0.0
                if isinstance(frame, End):
                    raise WorkerEnds
                if isinstance(frame, Sleep):
                    raise ModelSleeps
                assert isinstance(frame, Command)
                yield frame

    def receive(self, kind: type[Received]) -> Received:
        """Wait for a frame of this kind, such as the variables of a preloaded engine. Raises PeerClosed."""
        while True:
            self.read(None)
            for frame in self.frames:
                assert isinstance(frame, kind)
                return frame

    def read(self, wait_s: float | None) -> bool:
        """Read bytes that have arrived → whether there were any. `wait_s` None waits without an end. Raises
        PeerClosed.
        """
        readable = select.select([self.channel, self.woken], [], [], wait_s)[0]
        if self.woken in readable:
            self.woken.recv(RECEIVE_BYTES)
        if self.channel not in readable:
            return False
        try:
            data = self.channel.recv(RECEIVE_BYTES)
        except ConnectionError as error:
            raise PeerClosed from error
        if not data:
            raise PeerClosed
        self.frames.feed(data)
        return True
