"""Fast client: a connection to the broker for what passes with every token.

redis-py opens the connection (address, TLS, password); then hiredis packs commands and parses replies on
asyncio's transport. This takes 6 µs of CPU a command where redis-py takes 20 (XADD in a loop); beside an
engine, which keeps the caches cold, it saved a quarter of the agent's CPU a token (benchmarks/RESULTS.md).
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import DefaultParser
from redis.exceptions import ConnectionError, InvalidResponse, NoScriptError

from common.broker.client import DEMOTED, BrokerConnection
from common.broker.lua import Argument, Reply, ScriptCall

INCOMPLETE = object()
"""What the parser returns when the next reply has not arrived in full."""
HELD_BYTES = 1024
"""Bytes of held replies that wake the process all the same."""
RECEIVE_BYTES = 2**16


class FastConnection(asyncio.Protocol):
    """Sends commands without waiting for their replies. A broker that owes a reply and sends nothing is given
    up within ANSWER_S.

    `on_reply` is called with each reply: bytes, numbers, lists; an error of the broker is an exception.

    Attributes:
        closed: a future that ends with an error when the connection does.
        socket: socket of a TCP connection without TLS, whose replies can be held.
        is_held: whether replies wait in the kernel until `poll`.
    """

    def __init__(self, connection: BrokerConnection, on_reply: Callable[[Any], None]) -> None:
        self.connection = connection
        self.on_reply = on_reply
        self.parser = hiredis.Reader(
            protocolError=InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=INCOMPLETE
        )
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        assert connection._writer is not None
        self.transport = connection._writer.transport
        self.transport.set_protocol(self)
        self.socket = own_tcp_socket(self.transport)
        self.is_held = False
        connection.before_look = self.poll

    @classmethod
    async def connect(cls, redis: Redis, on_reply: Callable[[Any], None]) -> "FastConnection":
        """Open a connection beside those of `redis`, to the same broker.

        Raises what connecting raises (`common.broker.client.ERRORS`).
        """
        connection: BrokerConnection = redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        await connection.connect()  # type: ignore[no-untyped-call]
        if connection.has_spoken:  # unasked, as with too many clients; redis-py's reader has it, or the end
            reply = await connection.read_response()
            connection._close()  # type: ignore[no-untyped-call]
            raise InvalidResponse(f"it spoke first: {reply!r}")
        return cls(connection, on_reply)

    def send(self, *command: Argument) -> None:
        """Send a command, unless the connection is lost, as `closed` tells."""
        self.send_all([command])

    def send_all(self, commands: Sequence[Sequence[Argument]]) -> None:
        """Send commands with one write."""
        if self.transport.is_closing():  # maybe since before this was its protocol
            self.connection_lost(None)
            return
        self.connection.num_due += len(commands)
        # hiredis' type hints know commands of one argument only
        self.transport.write(b"".join([hiredis.pack_command(tuple(one)) for one in commands]))  # type: ignore[arg-type]

    def set_reading(self, reads: bool) -> None:
        """Read replies or, without `reads`, leave them with the broker."""
        transport = cast(asyncio.Transport, self.transport)
        if not transport.is_closing() and transport.is_reading() != reads:
            (transport.resume_reading if reads else transport.pause_reading)()

    def hold(self) -> None:
        """Have replies wait in the kernel until `poll`: waking for each would take longer than its work. The
        end of the connection wakes all the same, and so do replies over TLS or a Unix socket.
        """
        if self.socket is not None and not self.is_held:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, HELD_BYTES)
            self.is_held = True

    def poll(self) -> None:
        """Take the held replies that have come."""
        if self.socket is None or not self.is_held:
            return
        with contextlib.suppress(OSError):  # nothing has come, or nothing will: the transport finds out
            if data := self.socket.recv(RECEIVE_BYTES):
                self.data_received(data)

    def release(self) -> None:
        """Hold replies no more."""
        if self.socket is not None and self.is_held:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self.is_held = False

    def close(self) -> None:
        self.connection._close()  # type: ignore[no-untyped-call]
        self.close_socket()

    def close_socket(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def fail(self, error: Exception) -> None:
        """Close the connection; `closed` raises `error`."""
        self.close()
        self.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        connection = self.connection
        connection.num_silent = 0
        self.parser.feed(data)
        while (reply := self.parser.gets()) is not INCOMPLETE:
            connection.num_due = max(0, connection.num_due - 1)  # a message comes without a command
            if isinstance(reply, DEMOTED):
                connection.leave_replica()
                self.connection_lost(reply)
            self.on_reply(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self.close_socket()
        if not self.closed.done():
            gave_up = TimeoutError() if self.connection.gave_up else None
            self.closed.set_exception(gave_up or error or ConnectionError("Connection closed by server."))
            self.closed.exception()  # marks it as retrieved: not every user awaits it


def own_tcp_socket(transport: asyncio.BaseTransport) -> socket.socket | None:
    """Return a duplicate of a transport's socket, to be closed, too; None unless it is TCP without TLS."""
    if transport.is_closing():
        return None
    shared = transport.get_extra_info("socket")
    if transport.get_extra_info("ssl_object") or shared.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    own = socket.socket(shared.family, shared.type, shared.proto, os.dup(shared.fileno()))
    own.setblocking(False)
    return own


class SerialClient:
    """Sends a command once the last one has its reply, and reconnects after a lost connection.

    Attributes:
        on_answer: takes the reply to the last command, or the error in its place, once.
    """

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.connection: FastConnection | None = None
        self.on_answer: Callable[[Any], None] | None = None

    async def execute(self, *command: Argument) -> Any:
        """Return the broker's reply.

        Raises the broker's error, or that of a lost connection; then the command may have run all the same.
        """
        connection = self.connection or await self.connect()
        connection.release()
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.on_answer = lambda answer: None if reply.done() else reply.set_result(answer)
        connection.send(*command)
        try:
            answer = await reply
        except asyncio.CancelledError:
            self.close()  # a reply still to come must not be taken for that of the next command
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def is_connected(self) -> bool:
        return self.connection is not None

    def start(self, on_answer: Callable[[Any], None], *command: Argument) -> None:
        """Send a command on the open connection. `on_answer` takes the reply, or the error that `execute`
        raises; either may wait for `poll`.
        """
        assert self.connection is not None
        self.on_answer = on_answer
        self.connection.hold()
        self.connection.send(*command)

    def poll(self) -> None:
        """Take the reply to the command that was started, if it has come; else hold it no longer."""
        if (connection := self.connection) is not None:
            connection.poll()
            if self.on_answer is not None:
                connection.release()

    async def connect(self) -> FastConnection:
        self.connection = connection = await FastConnection.connect(self.redis, self.deliver)
        connection.closed.add_done_callback(lambda _: self.on_lost(connection))
        return connection

    def on_lost(self, connection: FastConnection) -> None:
        if connection is self.connection:
            self.connection = None
            self.deliver(connection.closed.exception() or ConnectionError())

    def deliver(self, answer: Any) -> None:
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is not None:
            on_answer(answer)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    async def run(self, call: ScriptCall[Reply]) -> Reply:
        """Return what a script's reply means, as `PoolClient.run` does."""
        try:
            reply = await self.execute(*call.command)
        except NoScriptError:
            reply = await self.execute(*call.command_with_text)
        return call.read(reply)
