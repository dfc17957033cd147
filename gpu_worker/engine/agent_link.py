"""The engine's side of the protocol (gpu_worker/protocol.py), over a blocking socket."""

import contextlib
import select
import socket
from collections.abc import Iterator

from gpu_worker.engine.errors import PeerClosed
from gpu_worker.protocol import Begin, Frame, FrameDecoder, Grant, encode

RECEIVE_BYTES = 2**18


class AgentLink:
    """Sends and receives frames: an engine that is too far ahead of its agent waits in `send`.

    Attributes:
        woken, waker: two ends of a pipe. It holds a byte from `wake` until the wait that this ends.
    """

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(True)
        self.channel = channel
        self.frames = FrameDecoder()
        woken, waker = socket.socketpair()
        woken.setblocking(False)
        waker.setblocking(False)
        self.woken = woken
        self.waker = waker

    def send(self, frame: Frame) -> None:
        try:
            self.channel.sendall(encode(frame))
        except ConnectionError as error:
            raise PeerClosed from error

    def wake(self) -> None:
        """End the wait for grants, or the next one where none has begun; from any thread."""
        with contextlib.suppress(BlockingIOError):  # full of bytes: it is woken
            self.waker.send(b"\0")

    def grants(self, wait_s: float) -> Iterator[Grant]:
        """Yield all grants that have arrived, in order; wait up to `wait_s` for the first, or until `wake`.
        Raises PeerClosed.
        """
        while self.receive(wait_s):
            for frame in self.frames:
                wait_s = 0.0
                assert isinstance(frame, Grant)
                yield frame

    def receive_variables(self) -> Begin:
        """Wait for the variables of an engine that was preloaded. Raises PeerClosed."""
        while True:
            self.receive(None)
            for frame in self.frames:
                assert isinstance(frame, Begin)
                return frame

    def receive(self, wait_s: float | None) -> bool:
        """Read what has arrived → whether something has; None waits for it. Raises PeerClosed."""
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
