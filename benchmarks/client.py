"""HTTP client of the benchmarks; prints nothing. It costs little CPU, since it shares the cores with what it
measures: one connection a request, frames with their arrival times.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import orjson

LIMIT_BYTES = 2**24


class HttpStatusError(Exception):
    """The server answered with another status than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body
        super().__init__(f"{status}: {body[:300]!r}")


class StreamBroken(Exception):
    """The connection ended before the stream did."""


@dataclass(slots=True)
class Stream:
    """The answer to one request.

    Attributes:
        frames: the JSON objects, in order; `[DONE]` is left out.
        times_s: when each arrived (monotonic clock).
        sent_s: when the request was sent.
        place: path at which the answer goes on, once it has begun.
    """

    sent_s: float = 0.0
    frames: list[dict[str, Any]] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    place: str = ""

    @property
    def ids(self) -> list[int]:
        """Token ids of TGI's frames."""
        return [frame["token"]["id"] for frame in self.frames]

    @property
    def gaps_s(self) -> list[float]:
        return [later - sooner for sooner, later in pairwise(self.times_s)]


class EventReader:
    """Reads one stream of server-sent events, and goes on with it at any gateway when it breaks off.

    Attributes:
        place: path at which the answer goes on; empty until the server has named it.
        num_seen: frames that were read, `[DONE]` too.
    """

    def __init__(self, base_url: str) -> None:
        self.url = urlsplit(base_url)
        self.place = ""
        self.num_seen = 0

    def post(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] = MappingProxyType({})
    ) -> AsyncIterator[dict[str, Any]]:
        """Yields the objects of the answer to `body`, as they arrive. Raises HttpStatusError or
        StreamBroken.
        """
        content = json.dumps(body).encode()
        head = [
            f"POST {path} HTTP/1.1",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return self.read(head, content)

    def go_on(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the objects after the last one. Raises HttpStatusError or StreamBroken."""
        num_seen = [f"Last-Event-ID: {self.num_seen}"] if self.num_seen else []
        return self.read([f"GET {self.place} HTTP/1.1", *num_seen], b"")

    async def read(self, head: list[str], content: bytes) -> AsyncIterator[dict[str, Any]]:
        reader, writer = await asyncio.open_connection(
            self.url.hostname, self.url.port or 80, limit=LIMIT_BYTES
        )
        try:
            lines = [*head, f"Host: {self.url.netloc}", "Connection: close", "", ""]
            writer.write("\r\n".join(lines).encode() + content)
            status = await self.read_head(reader)
            if status == 204:
                return
            if status != 200:
                raise HttpStatusError(status, await reader.read())
            async for frame in self.read_frames(reader):
                yield frame
        finally:
            writer.close()

    async def read_head(self, reader: asyncio.StreamReader) -> int:
        """The status."""
        first = await reader.readline()
        if not first:
            raise StreamBroken(f"{self.url.geturl()}: closed without an answer")
        while (line := (await reader.readline()).rstrip()) != b"":
            name, _, value = line.decode().partition(":")
            if name.lower() == "content-location":
                self.place = value.strip()
        return int(first.split()[1])

    async def read_frames(self, reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
        rest = b""
        # all that has arrived at once: every wait costs more than a frame
        while data := await reader.read(LIMIT_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line == b"0\r":
                    return
                if line.startswith(b"data:"):
                    self.num_seen += 1
                    if line[5:].strip() != b"[DONE]":
                        yield orjson.loads(line[5:])
        raise StreamBroken(f"{self.url.geturl()}: the stream broke off")


async def stream(
    url: str,
    body: dict[str, Any],
    into: Stream | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Stream:
    """Reads a whole stream. `into` can be read while it fills."""
    answer = into or Stream()
    answer.sent_s = time.monotonic()
    reader = EventReader(url)
    async for frame in reader.post(urlsplit(url).path, body, headers):
        answer.place = reader.place
        answer.times_s.append(time.monotonic())
        answer.frames.append(frame)
    return answer
