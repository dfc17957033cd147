"""A connection to the broker for what passes with every token: words out, replies in. redis-py makes it
(address, TLS, password), then steps aside: next to an engine that empties the caches, its layers around a
command cost several times what the command does.
"""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, DefaultParser
from redis.exceptions import ConnectionError, InvalidResponse, NoScriptError

from common.broker.client import Script, load

Argument = str | bytes | int
NOTHING_YET = object()


class FastConnection(asyncio.Protocol):
    """`hear` is called with each reply: bytes, numbers, lists; what the broker refuses is an exception.

    Attributes:
        over: ends with an error when the connection does.
    """

    def __init__(self, connection: AbstractConnection, hear: Callable[[Any], None]) -> None:
        self.connection, self.hear = connection, hear
        self.replies = hiredis.Reader(
            protocolError=InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=NOTHING_YET
        )
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        assert connection._writer is not None
        self.transport = connection._writer.transport
        self.transport.set_protocol(self)

    @classmethod
    async def dial(cls, redis: Redis, hear: Callable[[Any], None]) -> "FastConnection":
        """A connection beside those of `redis`, to the same broker. Raises what connecting raises
        (`common.broker.client.ERRORS`).
        """
        connection = redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        await connection.connect()
        return cls(connection, hear)

    def say(self, *words: Argument) -> None:
        # its hints know one word only
        self.transport.write(hiredis.pack_command(words))  # type: ignore[arg-type]

    def close(self) -> None:
        self.connection._close()  # type: ignore[no-untyped-call]

    def fail(self, error: Exception) -> None:
        """Ends the connection, for this reason."""
        self.close()
        self.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self.replies.feed(data)
        while (reply := self.replies.gets()) is not NOTHING_YET:
            self.hear(reply)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(error or ConnectionError("Connection closed by server."))
            self.over.exception()  # not everybody waits for it


class SerialClient:
    """Asks the broker one thing after the other, on a wire that is dialled anew when it was lost."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.wire: FastConnection | None = None
        self.answer: asyncio.Future[Any] | None = None

    async def ask(self, *words: Argument) -> Any:
        """The broker's answer. Raises what it refuses, or what befell the wire; then it may have done it all
        the same.
        """
        wire = self.wire or await self.dial()
        self.answer = asyncio.get_running_loop().create_future()
        wire.say(*words)
        try:
            answer = await self.answer
        except asyncio.CancelledError:  # its answer must not be taken for another's
            self.hang_up()
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def dial(self) -> FastConnection:
        self.wire = wire = await FastConnection.dial(self.redis, self.hear)
        wire.over.add_done_callback(lambda _: self.lost(wire))
        return wire

    def hear(self, reply: Any) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(reply)

    def lost(self, wire: FastConnection) -> None:
        if wire is self.wire:
            self.wire = None
            self.hear(wire.over.exception())

    def hang_up(self) -> None:
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    def script(self, name: str) -> Script:
        """As `common.broker.client.script`."""
        text = load(name)
        digest = hashlib.sha1(text.encode()).hexdigest()

        async def call(keys: list[str], args: list[Argument]) -> Any:
            try:
                return await self.ask("EVALSHA", digest, len(keys), *keys, *args)
            except NoScriptError:
                return await self.ask("EVAL", text, len(keys), *keys, *args)

        return call
