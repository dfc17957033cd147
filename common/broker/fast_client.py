"""Fast client: a connection to the broker for what passes with every token.

redis-py opens the connection (address, TLS, password); then hiredis packs commands and parses replies on
asyncio's transport. This takes 6 µs of CPU a command where redis-py takes 20 (XADD in a loop); beside an
engine, which keeps the caches cold, it saved a quarter of the agent's CPU a token (benchmarks/RESULTS.md).
"""

import asyncio
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, DefaultParser
from redis.exceptions import ConnectionError, InvalidResponse, NoScriptError, ReadOnlyError

from common.broker.client import Script, load_script

Argument = str | bytes | int
INCOMPLETE = object()
"""What the parser returns when the next reply has not arrived in full."""


class FastConnection(asyncio.Protocol):
    """FastConnection: sends commands without waiting for their replies.

    `on_reply` is called with each reply: bytes, numbers, lists; an error of the broker is an exception.

    Attributes:
        closed: a future that ends with an error when the connection does.
    """

    def __init__(self, connection: AbstractConnection, on_reply: Callable[[Any], None]) -> None:
        self.connection = connection
        self.on_reply = on_reply
        self.parser = hiredis.Reader(
            protocolError=InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=INCOMPLETE
        )
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        assert connection._writer is not None
        self.transport = connection._writer.transport
        self.transport.set_protocol(self)

    @classmethod
    async def connect(cls, redis: Redis, on_reply: Callable[[Any], None]) -> "FastConnection":
        """Open a connection beside those of `redis`, to the same broker.

        Raises what connecting raises (`common.broker.client.ERRORS`).
        """
        connection = redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        await connection.connect()
        return cls(connection, on_reply)

    def send(self, *command: Argument) -> None:
        """Send a command, unless the connection is lost; `closed` tells that."""
        self.send_all([command])

    def send_all(self, commands: Sequence[Sequence[Argument]]) -> None:
        """Send commands with one write."""
        if self.transport.is_closing():  # maybe since before this was its protocol
            self.connection_lost(None)
            return
        # hiredis' type hints know commands of one argument only
        self.transport.write(b"".join([hiredis.pack_command(tuple(one)) for one in commands]))  # type: ignore[arg-type]

    def set_reading(self, reads: bool) -> None:
        """Whether replies are read; those that are not wait with the broker."""
        transport = cast(asyncio.Transport, self.transport)
        if not transport.is_closing() and transport.is_reading() != reads:
            (transport.resume_reading if reads else transport.pause_reading)()

    def close(self) -> None:
        self.connection._close()  # type: ignore[no-untyped-call]

    def fail(self, error: Exception) -> None:
        """Close the connection; `closed` raises `error`."""
        self.close()
        self.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self.parser.feed(data)
        while (reply := self.parser.gets()) is not INCOMPLETE:
            self.on_reply(reply)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_exception(error or ConnectionError("Connection closed by server."))
            self.closed.exception()  # marks it as retrieved: not every user awaits it


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """ScriptCall: a script of `common/scripts` with its keys and arguments."""

    name: str
    keys: Sequence[str]
    args: Sequence[Argument]

    @property
    def command(self) -> tuple[Argument, ...]:
        return ("EVALSHA", script_digest(self.name), len(self.keys), *self.keys, *self.args)


@functools.cache
def script_digest(name: str) -> str:
    return hashlib.sha1(load_script(name).encode()).hexdigest()


class SerialClient:
    """SerialClient: sends a command when the reply to the one before has come, and reconnects after a lost
    connection.

    Attributes:
        reply: to the command sent last, once it has come.
    """

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.connection: FastConnection | None = None
        self.reply: asyncio.Future[Any] | None = None

    async def execute(self, *command: Argument) -> Any:
        """Return the broker's reply.

        Raises the broker's error, or that of a lost connection; then the command may have run all the same.
        """
        connection = self.connection or await self.connect()
        self.reply = asyncio.get_running_loop().create_future()
        connection.send(*command)
        try:
            reply = await self.reply
        except asyncio.CancelledError:
            self.close()  # a reply still to come must not be taken for that of the next command
            raise
        if isinstance(reply, ReadOnlyError):
            self.close()  # what was the primary is a replica: the next connection leads to the new one
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def connect(self) -> FastConnection:
        self.connection = connection = await FastConnection.connect(self.redis, self.on_reply)
        connection.closed.add_done_callback(lambda _: self.on_lost(connection))
        return connection

    def on_reply(self, reply: Any) -> None:
        if self.reply is not None and not self.reply.done():
            self.reply.set_result(reply)

    def on_lost(self, connection: FastConnection) -> None:
        if connection is self.connection:
            self.connection = None
            if self.reply is not None and not self.reply.done():
                self.reply.set_exception(connection.closed.exception() or ConnectionError())

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def script(self, name: str) -> Script:
        """Return the script as a callable, as `common.broker.client.script` does."""
        text, digest = load_script(name), script_digest(name)

        async def call(keys: list[str], args: list[Argument]) -> Any:
            try:
                return await self.execute("EVALSHA", digest, len(keys), *keys, *args)
            except NoScriptError:
                return await self.execute("EVAL", text, len(keys), *keys, *args)

        return call
