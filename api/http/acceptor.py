"""Acceptor: takes new connections at once, and serves them in turn by their addresses.

The kernel has one queue for all addresses. In it a client would wait until every connection of a flood from
another address has been served.
"""

import asyncio
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

BACKLOG = 2048
MAX_ACCEPTED = 256
"""Connections taken from the kernel in one turn of the event loop; each takes some microseconds."""
MAX_BEGUN = 4
"""Connections that begin in one turn; the first request of each may take a millisecond or more."""
MAX_WAITING = 4096
FULL_PAUSE_S = 0.1
"""How long nothing is accepted when the process has no descriptor left."""


class Acceptor:
    """The listeners of a gateway, and the connections that have not begun.

    Args:
        begin: serves a connection.

    Attributes:
        waiting: connections by address; the address whose turn it is comes first.
        beginning: tasks of `begin`.
        has_turn: whether `on_turn` is due.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        begin: Callable[[socket.socket], Coroutine[Any, Any, None]],
    ) -> None:
        self.listeners = [*listeners]
        self.begin = begin
        self.waiting: OrderedDict[str, deque[socket.socket]] = OrderedDict()
        self.num_waiting = 0
        self.beginning: set[asyncio.Task[None]] = set()
        self.has_turn = False

    def open(self) -> None:
        """Listen, and take connections as they come."""
        for listener in self.listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self.watch(listener)

    def watch(self, listener: socket.socket) -> None:
        if listener in self.listeners:
            asyncio.get_running_loop().add_reader(listener, self.accept, listener)

    def close(self) -> None:
        """Stop listening, and let all accepted connections begin: closing a listener would reset those that
        are still in its queue.
        """
        loop = asyncio.get_running_loop()
        while self.listeners:
            listener = self.listeners.pop()
            loop.remove_reader(listener)
            while self.accept(listener):
                pass
            listener.close()
        self.take_turns(self.num_waiting)

    # --- accepting ------------------------------------------------------------------------------------------

    def accept(self, listener: socket.socket) -> int:
        """Take up to MAX_ACCEPTED connections that the kernel has accepted. Returns their number."""
        for number in range(MAX_ACCEPTED):
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                return number
            except ConnectionError:  # its client has gone
                continue
            except OSError:
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(FULL_PAUSE_S, self.watch, listener)
                return 0
            connection.setblocking(False)
            self.add(address[0], connection)
        return MAX_ACCEPTED

    def add(self, address: str, connection: socket.socket) -> None:
        """Let a connection wait for its turn. Beyond MAX_WAITING the longest queue loses its oldest one."""
        self.waiting.setdefault(address, deque()).append(connection)
        self.num_waiting += 1
        if self.num_waiting > MAX_WAITING:
            max(self.waiting.values(), key=len).popleft().close()
            self.num_waiting -= 1
        if not self.has_turn:
            self.has_turn = True
            asyncio.get_running_loop().call_soon(self.on_turn)

    # --- turns ----------------------------------------------------------------------------------------------

    def on_turn(self) -> None:
        self.take_turns(MAX_BEGUN)
        self.has_turn = self.num_waiting > 0
        if self.has_turn:
            asyncio.get_running_loop().call_soon(self.on_turn)

    def take_turns(self, number: int) -> None:
        """Let connections begin, one of each address in turn."""
        for _ in range(min(number, self.num_waiting)):
            address, queue = self.waiting.popitem(last=False)
            connection = queue.popleft()
            self.num_waiting -= 1
            if queue:
                self.waiting[address] = queue
            task = asyncio.create_task(self.begin(connection))
            self.beginning.add(task)
            task.add_done_callback(self.beginning.discard)
