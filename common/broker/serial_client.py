"""Serial client: one fast connection to the broker, for commands that follow one another."""

import asyncio
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError, NoScriptError, ReadOnlyError

from common.broker.fast_client import FastConnection
from common.broker.lua import Argument, Reply, ScriptCall


class SerialClient:
    """SerialClient: sends a command when the reply to the one before has come, and reconnects after a lost
    connection.

    Attributes:
        on_answer: takes the reply to the command sent last, or why there is none, once.
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
        """Send a command on the connection that there is. `on_answer` takes the reply, or what `execute`
        raises; either may wait for `poll`.
        """
        assert self.connection is not None
        self.on_answer = on_answer
        self.connection.hold()
        self.connection.send(*command)

    def poll(self) -> None:
        """Take the reply to what was started, if it has come; else what is missing of it is not held."""
        if (connection := self.connection) is not None:
            connection.poll()
            if self.on_answer is not None:
                connection.release()

    async def connect(self) -> FastConnection:
        self.connection = connection = await FastConnection.connect(self.redis, self.on_reply)
        connection.closed.add_done_callback(lambda _: self.on_lost(connection))
        return connection

    def on_reply(self, reply: Any) -> None:
        if isinstance(reply, ReadOnlyError):
            self.close()  # what was the primary is a replica: the next connection leads to the new one
        self.deliver(reply)

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
