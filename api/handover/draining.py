"""Draining: what a gateway does from its first SIGTERM until it ends.

It accepts no new connections, so that a proxy tries another gateway, and finishes the requests on those that
it has. If there is a socket keeper, it hands its answers over to other gateways, or to its own successor. If
the launcher ends its whole fleet, gateways go on listening and refuse new requests, since nobody else would
answer. Requests that do not finish in time get an error.
"""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import Request

from api.errors import unavailable
from api.handover.answer_socket import KeeperChannel
from api.handover.heir import InheritedConnection, go_on
from api.http.connection_limits import Acceptor
from common.messages.kept_answer import KeptAnswer
from common.process.event_loop import until_beat

SERVING_TICK_S = 1.0
DRAINING_TICK_S = 0.1
"""Each tick wakes the process, which slows a busy engine beside it by some microseconds a token."""
FIRST_REQUEST_TICKS = 20
"""Ticks that an open connection has for its first request. Sockets are read before each tick, so it has more
time on a busy machine.
"""
KEEPER_GOES_S = 1.0
"""How long the launcher's keeper may outlive a gateway's SIGTERM if all processes got it at once. A gateway
hands nothing over before that.
"""


async def check_serving(request: Request) -> None:
    """Raises ApiError (503) while the gateway refuses new requests."""
    if request.app.state.refuses():
        raise unavailable("this gateway is shutting down")


class GatewayServer(uvicorn.Server):
    """A server that ends when the requests on all its connections are finished. These include connections
    that only the kernel has accepted so far; uvicorn's own server cuts them. It also continues answers of
    other gateways.

    Attributes:
        since_s: monotonic time since which it drains; None while it serves.
        refuses: whether it refuses new requests.
        ticks_since_closed: ticks since it accepts no new connections; -1 before.
        signalled: set by a signal.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        channel: KeeperChannel,
        timeout_s: float,
        *,
        is_last: bool = False,
        on_start: Callable[[], None] = lambda: None,
        on_timeout: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            is_last: whether nobody else listens on its port when its keeper has gone.
            on_start: called once, when it begins to drain.
            on_timeout: called when the time is over; ends the requests that are left.
        """
        super().__init__(config)
        self.channel = channel
        self.timeout_s = timeout_s
        self.is_last = is_last
        self.on_start = on_start
        self.on_timeout = on_timeout
        self.since_s: float | None = None
        self.refuses = False
        self.ticks_since_closed = -1
        self.acceptor = Acceptor((), self.serve_connection)
        self.signalled = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self.acceptor = Acceptor(sockets or (), self.serve_connection)
        self.acceptor.open()
        await self.channel.listen(self.inherit)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.acceptor.close()
        await super().shutdown([])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal. Later SIGTERMs are ignored, since both the machine and the launcher may
        send one; a second Ctrl-C ends the drain.
        """
        if self.since_s is None:
            self.since_s = time.monotonic()
            self.on_start()
        elif sig == signal.SIGINT:
            super().handle_exit(sig, frame)
        self.signalled.set()

    async def main_loop(self) -> None:
        """Call `on_tick` at intervals, and at a signal, until it returns that the server stops."""
        while not await self.on_tick(0):
            if self.since_s is not None:
                await asyncio.sleep(DRAINING_TICK_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_beat(SERVING_TICK_S)):
                    await self.signalled.wait()

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server stops."""
        stops = await super().on_tick(counter)
        if self.since_s is None:
            return stops
        drained_s = time.monotonic() - self.since_s
        if self.channel.is_kept():
            if drained_s < KEEPER_GOES_S:
                return stops
            self.channel.hand_over()
            self.stop_accepting()
        elif self.is_last:
            self.refuses = True
        else:
            self.stop_accepting()
        is_idle = not self.server_state.tasks and not self.newly_connected()
        is_late = drained_s > self.timeout_s
        if is_late:
            self.on_timeout()
        return stops or is_idle or is_late

    def stop_accepting(self) -> None:
        """Accept no new connections, and no further requests on those that are open."""
        self.ticks_since_closed += 1
        if self.ticks_since_closed == 0:
            self.acceptor.close()
            self.server_state.tasks |= self.acceptor.beginning
            for task in self.acceptor.beginning:
                task.add_done_callback(self.server_state.tasks.discard)
        for connection in {*self.server_state.connections} - self.newly_connected():
            connection.shutdown()

    async def serve_connection(self, connection: socket.socket) -> None:
        protocol: Any = self.config.http_protocol_class
        made = partial(protocol, self.config, self.server_state, self.lifespan.state)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(made, connection)
        except OSError:  # its client has gone
            connection.close()

    def inherit(self, answer: KeptAnswer, connection: socket.socket) -> None:
        """Continue an answer of another gateway, in a task that the server waits for before it ends."""
        made = partial(InheritedConnection, self.config, self.server_state, self.lifespan.state)
        task = asyncio.create_task(go_on(answer, connection, made, self.channel))
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)

    def newly_connected(self) -> set[Any]:
        """Connections whose first request may be on its way."""
        if not 0 <= self.ticks_since_closed <= FIRST_REQUEST_TICKS:
            return set()
        connections: set[Any] = self.server_state.connections
        return {connection for connection in connections if connection.cycle is None}
