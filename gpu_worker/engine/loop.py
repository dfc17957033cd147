"""The engine's loops: rank 0 takes grants from the agent, the other ranks take them from rank 0."""

import contextlib
import select
import socket
import time
from collections.abc import Iterator

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.protocol import Begin, Frame, FrameDecoder, Grant, PeerClosed, StepResult, encode

RECEIVE_BYTES = 2**18
KEEPALIVE_S = 5.0


class AgentLink:
    """The engine's side of the protocol (gpu_worker/protocol.py), over a blocking socket: an engine that is
    too far ahead of its agent waits in `send`.

    Attributes:
        woken, waker: the two ends of a pipe; a byte in it ends the wait for grants.
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
        """End the wait for grants, or the next wait if none has begun. Any thread may call it."""
        with contextlib.suppress(BlockingIOError):  # a full pipe ends the wait, too
            self.waker.send(b"\0")

    def grants(self, wait_s: float) -> Iterator[Grant]:
        """Yield all grants that have arrived, in order. Wait for the first up to `wait_s`, or until `wake` is
        called. Raises PeerClosed.
        """
        while self.read(wait_s):
            for frame in self.frames:
                wait_s = 0.0
                assert isinstance(frame, Grant)
                yield frame

    def receive_variables(self) -> Begin:
        """Wait for the variables of a preloaded engine. Raises PeerClosed."""
        while True:
            self.read(None)
            for frame in self.frames:
                assert isinstance(frame, Begin)
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


def run_leader(engine: Engine, communicator: Communicator, link: AgentLink) -> None:
    """Run steps until the agent closes the socket (raises PeerClosed).

    The launch of a step waits for grants while the step before it runs. If no step can run, the loop waits
    for a grant or for a compiled grammar. One that comes before the wait begins ends the wait, too.
    """
    engine.matchers.on_compiled = link.wake
    idle_at_s = time.monotonic() + KEEPALIVE_S
    wait_s = 0.0
    while True:
        for grant in communicator.broadcast_grants(link.grants(wait_s)):
            engine.apply(grant)
        if (slack_s := engine.slack_s()) > 0:
            wait_s = slack_s
            continue
        step = engine.step()
        now_s = time.monotonic()
        if step is not None:
            link.send(step)
        elif now_s >= idle_at_s:
            idle(engine, link)
        if step is not None or now_s >= idle_at_s:
            idle_at_s = now_s + KEEPALIVE_S
        wait_s = 0.0 if step else idle_at_s - now_s


def idle(engine: Engine, link: AgentLink) -> None:
    """Tell the agent that the engine lives if rows wait for blocks, steps or grammars; prepare for grammars
    if there are no rows.
    """
    if engine.rows.rows:
        link.send(StepResult(engine.collected_step))
    else:
        engine.matchers.prepare()


def run_follower(engine: Engine, communicator: Communicator) -> None:
    """Run the same steps as rank 0 until rank 0 ends (raises PeerClosed)."""
    while True:
        for grant in communicator.receive_grants():
            engine.apply(grant)
        engine.step()
