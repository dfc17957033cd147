"""A receiver of webhooks, in this process: it notes what it gets, and answers as a test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import orjson

SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="


@dataclass
class Delivery:
    """One delivery: its headers, by lower-case name, and its body."""

    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def event(self) -> dict[str, Any]:
        content: dict[str, Any] = orjson.loads(self.body)
        return content


@dataclass
class Receiver:
    """Attributes:
    statuses: of the next answers; then 200. 0 closes the connection without an answer.
    location: of answers that redirect.
    answers: answers are sent while it is set.
    """

    statuses: list[int] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    location: str = ""
    port: int = 0
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}/hooks?from=fleet"

    def hook(self, **fields: Any) -> dict[str, Any]:
        """The field of a request."""
        return {"url": self.url, "secret": SECRET} | fields

    @property
    def ids(self) -> list[str]:
        return [delivery.id for delivery in self.deliveries]

    @property
    def told(self) -> set[str]:
        """Ids of what has ended."""
        return {delivery.event["data"]["id"] for delivery in self.deliveries}

    @property
    def types(self) -> list[str]:
        return [delivery.event["type"] for delivery in self.deliveries]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")[1:-2]
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
            self.deliveries.append(Delivery(headers, body))
            await self.answers.wait()
            if status := self.statuses.pop(0) if self.statuses else 200:
                location = f"location: {self.location}\r\n" if self.location else ""
                writer.write(f"HTTP/1.1 {status} X\r\n{location}content-length: 0\r\n\r\n".encode())
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def receiving(*statuses: int) -> AsyncIterator[Receiver]:
    receiver = Receiver([*statuses])
    receiver.answers.set()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    async with server:
        yield receiver
