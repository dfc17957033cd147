"""HTTP client of the benchmarks; prints nothing. It costs little CPU, since it shares the cores with what it
measures: one connection a request, frames with their arrival times.
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
    """

    sent_s: float = 0.0
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
    """Posts `body` and yields the objects of its server-sent events, as they arrive. Raises
    HttpStatusError or StreamBroken.
    """
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=LIMIT_BYTES)
    try:
        content = json.dumps(body).encode()
        head = [
            f"POST {parts.path} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            "Connection: close",
            f"Content-Length: {len(content)}",
        ]
        writer.write("\r\n".join([*head, "", ""]).encode() + content)
        head_line = await reader.readline()
        if not head_line:
            raise StreamBroken(f"{url}: closed without an answer")
        status = int(head_line.split()[1])
        if status != 200:
            raise HttpStatusError(status, (await reader.read()).split(b"\r\n\r\n", 1)[-1])
        rest = b""
        # all that has arrived at once: every wait costs more than a frame
        while data := await reader.read(LIMIT_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield orjson.loads(line[5:])
                elif line == b"0\r":
                    return
        raise StreamBroken(f"{url}: the stream broke off")
    finally:
        writer.close()


async def stream(url: str, body: dict[str, Any], into: Stream | None = None) -> Stream:
    """Reads a whole stream. `into` can be read while it fills."""
    answer = into or Stream()
    answer.sent_s = time.monotonic()
    async for frame in events(url, body):
        answer.times_s.append(time.monotonic())
        answer.frames.append(frame)
    return answer
