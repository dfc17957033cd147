"""A client with a plain socket: one request, and all bytes of its response."""

import asyncio
import json
import re
from typing import Any

DIFFERS = re.compile(
    rb"HTTP/1.1 100 Continue\r\n\r\n|[0-9a-f]{32}|\"created(?:_at)?\":\d+|\ndate: [^\r]*"
    rb"|\nx-[a-z-]*time[a-z-]*: [^\r]*|\n[Cc]onnection: close\r|3\r\n: \n\r\n|4\r\n: \n\n\r\n|(?m:^: \n\n?)"
)
"""What differs between two answers to one request: interim responses, ids, seconds, times, and keep-alive
comments (as chunks, and as `curl` prints them).
"""


INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class Talk:
    """A plain socket's request, and all bytes of its response."""

    def __init__(
        self,
        port: int,
        path: str,
        body: dict[str, Any],
        slow: bool = False,
        pipelined: bool = False,
        version: str = "1.1",
        sends_no_more: bool = False,
    ) -> None:
        self.port, self.path, self.body, self.slow, self.pipelined = port, path, body, slow, pipelined
        self.version, self.sends_no_more = version, sends_no_more
        self.seen = b""

    async def run(self) -> bytes:
        self.seen = b""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=4096)
        content = json.dumps(self.body).encode()
        head = f"POST {self.path} HTTP/{self.version}\r\nhost: test\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
        writer.write(request * 2 if self.pipelined else request)
        if self.sends_no_more:
            writer.write_eof()
        try:
            await self.read(reader)
        finally:
            writer.close()
        return DIFFERS.sub(b"", self.seen)

    async def read(self, reader: asyncio.StreamReader) -> None:
        while not is_whole(self.seen.replace(INTERIM, b"")):
            data = await reader.read(700 if self.slow else 65536)
            if not data and self.version == "1.0" and b"\r\n\r\n" in self.seen:
                return  # its body ends with the connection
            assert data, f"{self.path} is cut: {self.seen[-300:]!r}"
            self.seen += data
            if self.slow:
                await asyncio.sleep(0.002)
        if self.pipelined:
            assert await reader.read() == b""


def is_whole(seen: bytes) -> bool:
    head, found, body = seen.partition(b"\r\n\r\n")
    if length := re.search(rb"content-length: (\d+)", head):
        return bool(found) and len(body) == int(length[1])
    return body.endswith(b"\r\n0\r\n\r\n")
