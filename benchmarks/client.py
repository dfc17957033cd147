"""A client that costs little: it shares the cores with what it measures. One connection a request, frames
with their arrival times.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import orjson

LIMIT_BYTES = 2**24


class Refused(Exception):
    """The server answered with another status than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body
        super().__init__(f"{status}: {body[:300]!r}")


class Broken(Exception):
    """The connection ended before the stream did."""


@dataclass(slots=True)
class Stream:
    """One streamed answer.

    Attributes:
        frames: the JSON objects, in order; `[DONE]` is left out.
        times_s: when each arrived (monotonic clock).
        asked_s: when the request was sent.
    """

    asked_s: float = 0.0
    frames: list[dict[str, Any]] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """Token ids of TGI's frames."""
        return [frame["token"]["id"] for frame in self.frames]

    @property
    def gaps_s(self) -> list[float]:
        return [later - sooner for sooner, later in pairwise(self.times_s)]


async def events(url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Posts `body` and yields the objects of its server-sent events, as they arrive. Raises Refused or
    Broken.
    """
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=LIMIT_BYTES)
    try:
        content = json.dumps(body).encode()
        head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        status = int((await reader.readline()).split()[1])
        if status != 200:
            raise Refused(status, (await reader.read()).split(b"\r\n\r\n", 1)[-1])
        rest = b""
        while data := await reader.read(
            LIMIT_BYTES
        ):  # once for all that has come: every wait costs more than a frame
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield orjson.loads(line[5:])
                elif line == b"0\r":
                    return
        raise Broken(f"{url}: the stream broke off")
    finally:
        writer.close()


async def stream(url: str, body: dict[str, Any], into: Stream | None = None) -> Stream:
    """The whole stream. `into` can be watched while it fills."""
    answer = into or Stream()
    answer.asked_s = time.monotonic()
    async for frame in events(url, body):
        answer.times_s.append(time.monotonic())
        answer.frames.append(frame)
    return answer
