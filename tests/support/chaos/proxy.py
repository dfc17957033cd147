"""Proxy between gateways and broker: it drops a share of the messages of subscriptions."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

READ_BYTES = 2**16
MESSAGE = b"*3\r\n$7\r\nmessage\r\n"


class LossyProxy:
    """Passes bytes on, but drops some `*3 message …` replies of subscribed connections at random.

    Attributes:
        address: returns the path of the broker's socket; called for each connection.
        share: of the messages that are dropped.
        num_dropped: messages dropped so far.
    """

    def __init__(self, address: Callable[[], str], draw: random.Random) -> None:
        self.address = address
        self.share = 0.0
        self.draw = draw
        self.num_dropped = 0
        self.connections: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self.serve(reader, writer))
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            server_reader, server_writer = await asyncio.open_unix_connection(self.address())
            with contextlib.closing(server_writer):
                await self.join(reader, writer, server_reader, server_writer)

    async def join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        """Connect both sides until either has closed."""
        subscribed = asyncio.Event()
        sides = [
            asyncio.create_task(self.pass_commands(reader, server_writer, subscribed)),
            asyncio.create_task(self.pass_replies(server_reader, writer, subscribed)),
        ]
        try:
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)

    async def pass_commands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, subscribed: asyncio.Event
    ) -> None:
        while data := await reader.read(READ_BYTES):
            if b"SUBSCRIBE" in data[:64]:
                subscribed.set()
            writer.write(data)
            await writer.drain()

    async def pass_replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, subscribed: asyncio.Event
    ) -> None:
        rest = b""
        while data := await reader.read(READ_BYTES):
            if subscribed.is_set():
                data, rest = self.drop(rest + data)
            writer.write(data)
            await writer.drain()

    def drop(self, data: bytes) -> tuple[bytes, bytes]:
        """Drop some whole replies. Return the rest, and the incomplete reply at the end."""
        kept, begin = [], 0
        while (end := end_of_reply(data, begin)) is not None:
            if data.startswith(MESSAGE, begin) and self.draw.random() < self.share:
                self.num_dropped += 1
            else:
                kept.append(data[begin:end])
            begin = end
        return b"".join(kept), data[begin:]


def end_of_reply(data: bytes, begin: int) -> int | None:
    """Return where the reply (RESP) that begins there ends; None if it is incomplete."""
    line_end = data.find(b"\r\n", begin)
    if line_end < 0:
        return None
    kind, end = data[begin : begin + 1], line_end + 2
    if kind == b"$":
        end += max(0, int(data[begin + 1 : line_end]) + 2)
        return end if end <= len(data) else None
    for _ in range(int(data[begin + 1 : line_end]) if kind == b"*" else 0):
        inner = end_of_reply(data, end)
        if inner is None:
            return None
        end = inner
    return end


@contextlib.asynccontextmanager
async def running_proxy(
    port: int, address: Callable[[], str], draw: random.Random
) -> AsyncIterator[LossyProxy]:
    """Run a proxy while the context is open."""
    proxy = LossyProxy(address, draw)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", port)
    try:
        yield proxy
    finally:
        server.close()
        for task in proxy.connections:
            task.cancel()
        await asyncio.gather(*proxy.connections, return_exceptions=True)
