"""HTTP as clients really speak it: a corpus of requests, each cut at every byte, is read as RFC 9110 and 9112
say, and as h11 alone reads it.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import h11
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from api.http.connection_limits import LIMITS, ConnectionLimits
from api.http.protocol import FREE_CHUNKS, MAX_HEADERS, HttpProtocol
from api.http.unread import UNREAD, UnreadAnswers
from common.settings.settings import Settings

Read = tuple[str, str, bytes]
"""Method, target and body of a request, as the application sees it."""
HOST = b"Host: x\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


def post(headers: bytes, body: bytes, target: bytes = b"/a", version: bytes = b"1.1") -> bytes:
    return b"POST %b HTTP/%b\r\n%b%b\r\n%b" % (target, version, HOST, headers, body)


def sized(body: bytes, headers: bytes = b"", **line: bytes) -> bytes:
    return post(headers + b"Content-Length: %d\r\n" % len(body), body, **line)


SERVED: dict[str, tuple[bytes, list[Read]]] = {
    "plain": (b"GET /a?b=c HTTP/1.1\r\n" + HOST + b"\r\n", [("GET", "/a?b=c", b"")]),
    "empty lines first": (b"\r\n\r\nGET / HTTP/1.1\r\n" + HOST + b"\r\n", [("GET", "/", b"")]),
    "body": (sized(b"abc"), [("POST", "/a", b"abc")]),
    "chunks": (post(CHUNKED, b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"), [("POST", "/a", b"abc")]),
    "chunk extensions": (post(CHUNKED, b'3;a=b;c="d"\r\nabc\r\n0;e\r\n\r\n'), [("POST", "/a", b"abc")]),
    "trailers": (post(CHUNKED, b"3\r\nabc\r\n0\r\nX-Sum: 1\r\n\r\n"), [("POST", "/a", b"abc")]),
    "upgrade with a body": (sized(b"abc", UPGRADE), [("POST", "/a", b"abc")]),
    "upgrade with chunks": (post(UPGRADE + CHUNKED, b"3\r\nabc\r\n0\r\n\r\n"), [("POST", "/a", b"abc")]),
    "upgrade whose body is a request": (sized(SMUGGLED, UPGRADE), [("POST", "/a", SMUGGLED)]),
    "upgrade to websocket": (
        b"GET /a HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + SMUGGLED,
        [("GET", "/a", b""), ("GET", "/smuggled", b"")],
    ),
    "pipelined": (
        sized(b"abc") + sized(b"de", target=b"/b"),
        [("POST", "/a", b"abc"), ("POST", "/b", b"de")],
    ),
    "pipelined after an upgrade": (
        sized(b"abc", UPGRADE) + sized(b"de", target=b"/b"),
        [("POST", "/a", b"abc"), ("POST", "/b", b"de")],
    ),
    "a whole URL": (sized(b"abc", target=b"http://other:8080/a?b"), [("POST", "/a?b", b"abc")]),
    "a URL without a path": (sized(b"", target=b"HTTP://other"), [("POST", "/", b"")]),
    "asterisk": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", [("OPTIONS", "*", b"")]),
    "trace": (b"TRACE /a HTTP/1.1\r\n" + HOST + b"\r\n", [("TRACE", "/a", b"")]),
    "expect": (sized(b"abc", b"Expect: 100-continue\r\n"), [("POST", "/a", b"abc")]),
    "version 1.0": (sized(b"abc", version=b"1.0"), [("POST", "/a", b"abc")]),
    "version 1.0 without a host": (b"GET /a HTTP/1.0\r\n\r\n", [("GET", "/a", b"")]),
    "version 1.0 kept alive": (
        b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        [("GET", "/a", b"")],
    ),
    "twice the same length": (sized(b"abc", b"Content-Length: 3\r\n"), [("POST", "/a", b"abc")]),
}
REFUSED: dict[str, tuple[bytes, int]] = {
    "no HTTP": (b"garbage\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(16) + b"\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "no host": (b"GET /a HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /a HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400),
    "two lengths": (sized(b"abc", b"Content-Length: 4\r\n"), 400),
    "a length with a sign": (post(b"Content-Length: +3\r\n", b"abc"), 400),
    "both framings": (sized(b"0\r\n\r\n", CHUNKED), 400),
    "chunks in version 1.0": (post(CHUNKED, b"0\r\n\r\n", version=b"1.0"), 400),
    "an unknown coding": (post(b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"), 501),
    "a chunk's size in words": (post(CHUNKED, b"three\r\nabc\r\n0\r\n\r\n"), 400),
    "a chunk that is longer than it says": (post(CHUNKED, b"2\r\nabc\r\n0\r\n\r\n"), 400),
    "a space before the colon": (b"GET /a HTTP/1.1\r\nHost : x\r\n\r\n", 400),
    "a tunnel": (b"CONNECT x:443 HTTP/1.1\r\n" + HOST + b"\r\n", 501),
    "a target that is no path": (b"GET a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "another scheme": (b"GET ftp://x/a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "many headers": (b"GET /a HTTP/1.1\r\n" + HOST + b"a:\r\n" * MAX_HEADERS + b"\r\n", 431),
}


OUR_OWN = {"empty lines first", "a whole URL", "a URL without a path"}
"""What h11 leaves to servers."""


class Memory(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 1), "sockname": ("192.0.2.2", 2)})
        self.written = b""
        self.ended = False

    def write(self, data: Any) -> None:
        assert not self.ended or not data
        self.written += bytes(data)

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.ended

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


@dataclass
class Echo:
    """An application that notes its requests, and answers each with the body."""

    seen: list[Read] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        else:
            return
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        self.seen.append((scope["method"], (scope["raw_path"] + query).decode(), body))
        assert not any(name == b"upgrade" for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


class Served:
    """A connection to an echoing application."""

    def __init__(self, **settings: Any) -> None:
        self.echo = Echo()
        config = uvicorn.Config(self.echo, log_config=None)
        limits = Settings(**settings)
        state = {UNREAD: UnreadAnswers(limits), LIMITS: ConnectionLimits(limits)}
        self.protocol = HttpProtocol(config, ServerState(), state)
        self.transport = Memory()
        self.protocol.connection_made(self.transport)

    async def receive(self, *parts: bytes) -> None:
        for part in parts:
            if not self.transport.ended:
                self.protocol.data_received(part)
            await turns(8)

    def close(self) -> None:
        self.protocol.connection_lost(None)

    @property
    def statuses(self) -> list[int]:
        parts = self.transport.written.split(b"HTTP/1.1 ")[1:]
        return [status for part in parts if (status := int(part[:3])) != 100]


async def turns(number: int) -> None:
    """Let the application go on until it waits, which takes less than `number` turns of the event loop."""
    for _ in range(number):
        await asyncio.sleep(0)


def cuts(data: bytes) -> Iterator[tuple[bytes, ...]]:
    """The data whole, in two parts in every way, and byte by byte."""
    yield (data,)
    yield from ((data[:i], data[i:]) for i in range(1, len(data)))
    yield tuple(bytes((byte,)) for byte in data)


def read_by_h11(data: bytes) -> list[Read]:
    """The requests of a connection, as h11 alone reads them."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    requests: list[Read] = []
    while isinstance(request := connection.next_event(), h11.Request):
        body = b""
        while isinstance(part := connection.next_event(), h11.Data):
            body += part.data
        requests.append((request.method.decode(), request.target.decode(), body))
        connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        connection.send(h11.EndOfMessage())
        if connection.our_state is h11.MUST_CLOSE:
            break
        connection.start_next_cycle()
    return requests


@pytest.mark.parametrize("name", SERVED)
async def test_a_request_reads_the_same_however_its_bytes_are_split(name: str) -> None:
    data, expected = SERVED[name]
    for parts in cuts(data):
        served = Served()
        await served.receive(*parts)
        assert served.echo.seen == expected, parts
        assert served.statuses == [200] * len(expected)
        assert not served.protocol.is_refused
        served.close()


@pytest.mark.parametrize("name", sorted(SERVED.keys() - OUR_OWN))
def test_h11_alone_reads_the_same(name: str) -> None:
    data, expected = SERVED[name]
    assert read_by_h11(data) == expected


@pytest.mark.parametrize("name", REFUSED)
async def test_bytes_that_are_not_served_are_refused_however_they_arrive(name: str) -> None:
    data, status = REFUSED[name]
    for parts in cuts(data):
        served = Served()
        await served.receive(*parts, SMUGGLED)
        assert served.statuses == [status], parts
        assert served.echo.seen == [] and served.transport.ended
        served.close()


async def test_a_head_is_refused_at_its_limit_however_it_comes() -> None:
    limit = 64 * 1024
    for cookie_bytes, status in ((limit - 200, 200), (limit + 1, 431), (50 * limit, 431)):
        data = b"GET / HTTP/1.1\r\n" + HOST + b"Cookie: " + b"a" * cookie_bytes + b"\r\n\r\n"
        for size in (len(data), 1000):
            served = Served()
            await served.receive(*(data[i : i + size] for i in range(0, len(data), size)))
            assert served.statuses == [status]
            served.close()


async def test_a_body_of_tiny_chunks_is_refused() -> None:
    """Each chunk costs some microseconds, whatever is in it."""
    for size, num_chunks, status in ((1, FREE_CHUNKS, 200), (1, FREE_CHUNKS + 100, 400), (64, 20_000, 200)):
        chunk = b"%x\r\n%b\r\n" % (size, b"x" * size)
        served = Served()
        await served.receive(post(CHUNKED, chunk * num_chunks + b"0\r\n\r\n"))
        assert served.statuses == [status]
        served.close()


async def test_an_answer_to_version_1_0_has_no_chunks() -> None:
    served = Served()
    await served.receive(sized(b"abc", version=b"1.0"))
    head, _, body = served.transport.written.partition(b"\r\n\r\n")
    assert body == b"abc" and b"transfer-encoding" not in head.lower()
    assert served.transport.ended, "the body ends with the connection"


async def test_a_client_that_expects_it_is_told_to_continue() -> None:
    served = Served()
    request = sized(b"abc", b"Expect: 100-continue\r\n")
    await served.receive(request[:-3])
    assert (
        served.transport.written == b"HTTP/1.1 100 \r\n\r\n" or b" 100 Continue" in served.transport.written
    )
    await served.receive(request[-3:])
    assert served.statuses == [200]


async def test_a_request_that_goes_on_after_its_answer_is_read_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("api.http.protocol.MAX_DRAINED_BYTES", 10_000)

    async def impatient(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    for num_bytes, is_cut in ((9000, False), (50_000, True)):
        served = Served()
        served.protocol.app = impatient
        await served.receive(post(b"Content-Length: %d\r\n" % num_bytes, b""))
        await served.receive(*[b"x" * 1000] * (num_bytes // 1000))
        assert served.transport.ended == is_cut
        served.protocol.app = served.echo
        await served.receive(sized(b"abc"))
        assert served.echo.seen == ([] if is_cut else [("POST", "/a", b"abc")])
        served.close()


async def test_invalid_bytes_after_an_answer_get_no_second_answer() -> None:
    async def impatient(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    served = Served()
    served.protocol.app = impatient
    await served.receive(post(CHUNKED, b"3\r\nabc\r\n"), b"no size\r\n", SMUGGLED)
    assert served.statuses == [413] and served.transport.ended
