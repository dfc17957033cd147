"""HTTP as clients really speak it, each request cut at every byte; floods of connections; unread bytes.
Feeds give what is ready, in order; each frame is written once, as one chunk, however its client reads;
clients skip the comments between frames.

Long work runs in slices, in turns or in a thread, so that no stream waits for it.
"""

import asyncio
import itertools
import json
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from api import event_loop
from api.app import own_listener
from api.event_loop import PacedQueue
from api.http.connection_limits import MAX_BEGUN, Acceptor, Connections
from api.http.protocol import FREE_CHUNKS, MAX_HEADERS, HttpProtocol
from api.http.sse import (
    CONNECTIONS,
    MAX_ITEMS,
    Change,
    Feed,
    FeedResponse,
    bytes_written,
)
from tests.support.waiting import wait_until

# --- protocol -----------------------------------------------------------------------------------------------

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
    "version 1.0 kept alive": (b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", [("GET", "/a", b"")]),
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

    def __init__(self, transport: Memory | None = None) -> None:
        self.echo = Echo()
        config = uvicorn.Config(self.echo, log_config=None)
        state = {CONNECTIONS: Connections()}
        self.protocol = HttpProtocol(config, ServerState(), state)
        self.transport = transport or Memory()
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


@pytest.mark.parametrize("name", REFUSED)
async def test_bytes_that_are_not_served_are_refused_however_they_arrive(name: str) -> None:
    data, status = REFUSED[name]
    for parts in cuts(data):
        served = Served()
        await served.receive(*parts, SMUGGLED)
        assert served.statuses == [status], parts
        assert served.echo.seen == [] and served.transport.ended
        head, _, error = served.transport.written.partition(b"\r\n\r\n")
        assert b"x-request-id: " in head and json.loads(error).keys() == {"error", "error_type"}
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


async def test_a_client_that_expects_it_is_told_to_continue() -> None:
    served = Served()
    request = sized(b"abc", b"Expect: 100-continue\r\n")
    await served.receive(request[:-3])
    assert (
        served.transport.written == b"HTTP/1.1 100 \r\n\r\n" or b" 100 Continue" in served.transport.written
    )
    await served.receive(request[-3:])
    assert served.statuses == [200]


async def impatient(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before the body is read."""
    await send({"type": "http.response.start", "status": 413, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_a_request_that_goes_on_after_its_answer_is_read_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("api.http.protocol.MAX_DRAINED_BYTES", 10_000)
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
    served = Served()
    served.protocol.app = impatient
    await served.receive(post(CHUNKED, b"3\r\nabc\r\n"), b"no size\r\n", SMUGGLED)
    assert served.statuses == [413] and served.transport.ended


# --- acceptor -----------------------------------------------------------------------------------------------


class Begun:
    """Notes the addresses of connections in the order in which they begin."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    async def begin(self, connection: socket.socket) -> None:
        self.addresses.append(connection.getpeername()[0])
        connection.close()


@pytest.fixture
def begun() -> Begun:
    return Begun()


@pytest.fixture
async def acceptor(begun: Begun) -> AsyncIterator[Acceptor]:
    acceptor = Acceptor([own_listener(0)], begun.begin)
    acceptor.open()
    yield acceptor
    acceptor.close()


def connect(acceptor: Acceptor, address: str, number: int) -> list[socket.socket]:
    """Connections that the kernel accepts while the event loop does something else."""
    place = acceptor.listeners[0].getsockname()
    return [socket.create_connection(place, source_address=(address, 0)) for _ in range(number)]


async def test_an_address_begins_while_hundreds_of_another_wait(acceptor: Acceptor, begun: Begun) -> None:
    flood, other = connect(acceptor, "127.0.1.1", 500), connect(acceptor, "127.0.0.1", 2)
    await wait_until(lambda: len(begun.addresses) == 502)
    last = max(i for i, address in enumerate(begun.addresses) if address == "127.0.0.1")
    assert last < 256 + 2 * MAX_BEGUN, "it is taken in the second turn, and begins soon after that"
    assert not acceptor.turns.waiting and acceptor.turns.num_waiting == 0
    for connection in (*flood, *other):
        connection.close()


# --- unread -------------------------------------------------------------------------------------------------


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def connection(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    loopback = "127.0.0.1" if request.param == socket.AF_INET else "::1"
    with (
        socket.create_server((loopback, 0), family=request.param) as listener,
        socket.create_connection(listener.getsockname()[:2]) as client,
        listener.accept()[0] as server,
    ):
        yield server, client


def test_every_byte_that_the_kernel_took_is_counted(connection: tuple[socket.socket, socket.socket]) -> None:
    server, client = connection
    server.setblocking(False)
    base, count, draw = bytes_written(server), 0, random.Random(3)
    reader = threading.Thread(target=read_slowly, args=(client,))
    reader.start()
    for _ in range(2000):
        try:
            count += server.send(bytes(draw.randrange(1, 9000)))
        except BlockingIOError:
            time.sleep(0.0005)
        assert bytes_written(server) - base == count
    server.close()
    reader.join()


def read_slowly(client: socket.socket) -> None:
    while client.recv(3000):
        time.sleep(0.0001)


def test_another_process_counts_the_same_bytes(connection: tuple[socket.socket, socket.socket]) -> None:
    server, client = connection
    base = bytes_written(server)
    copy = server.dup()
    server.sendall(b"abc")
    server.close()
    client.recv(2)
    with copy:
        assert bytes_written(copy) - base == 3


# --- writing ------------------------------------------------------------------------------------------------

HIGH = 400
"""Bytes that a client may leave unread before its gateway pauses."""
LAST = 10**6


class Numbers(Feed):
    """A frame for each number that has come; LAST is the last."""

    def __init__(self) -> None:
        super().__init__(Change())
        self.come: list[int] = []

    def take(self) -> list[bytes]:
        new, self.come = self.come[:MAX_ITEMS], self.come[MAX_ITEMS:]
        self.ended = LAST in new
        return [b"data: %d\n\n" % number for number in new]

    def put(self, *numbers: int) -> None:
        self.come += numbers
        self.changed.set()


class SlowClient(Memory):
    """A transport whose client reads when it is told to; `served` writes frames on it."""

    def __init__(self, frames: Feed) -> None:
        super().__init__()
        self.unread = 0
        self.served = Served(self)
        self.served.protocol.app = FeedResponse(frames, b": \n\n", {})
        self.served.protocol.data_received(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")

    def write(self, data: Any) -> None:
        super().write(data)
        self.unread += len(data)
        if self.unread > HIGH:
            self.served.protocol.pause_writing()

    def read(self) -> None:
        self.unread = 0
        self.served.protocol.resume_writing()

    @property
    def body(self) -> bytes:
        return self.written.partition(b"\r\n\r\n")[2]


def chunk(number: int) -> bytes:
    frame = b"data: %d\n\n" % number
    return b"%x\r\n%b\r\n" % (len(frame), frame)


STEPS = st.lists(st.tuples(st.sampled_from(["put", "read", "turn"]), st.integers(1, 2 * MAX_ITEMS)))


@settings(max_examples=300)
@given(steps=STEPS)
def test_frames_are_written_once_and_in_order_however_the_client_reads(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        numbers, put = Numbers(), 0
        client = SlowClient(numbers)
        for step, size in steps:
            if step == "put":
                numbers.put(*range(put, put + size))
                put += size
            elif step == "read":
                client.read()
            else:
                await turns(size % 8)
        numbers.put(LAST)
        async with asyncio.timeout(30):
            while not client.body.endswith(b"\r\n0\r\n\r\n"):
                client.read()
                await turns(1)
        assert client.body == b"".join(map(chunk, [*range(put), LAST])) + b"0\r\n\r\n"
        client.served.close()

    asyncio.run(run())


async def test_a_frame_that_cannot_be_rendered_ends_its_answer_and_harms_no_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = Numbers()
    client = SlowClient(numbers)
    numbers.put(0)
    await turns(8)

    def fail() -> list[bytes]:
        raise LookupError("no such token")

    monkeypatch.setattr(numbers, "take", fail)
    numbers.put(1)
    numbers.put(2)
    await turns(8)
    assert client.ended and client.body == chunk(0)


# --- slices and turns ---------------------------------------------------------------------------------------


async def test_parts_are_done_at_once_as_far_as_a_slice_goes_and_all_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, queue, done = asyncio.get_running_loop(), PacedQueue(), []
    monkeypatch.setattr(loop, "time", lambda: 1.0)  # uvloop's stands still within a turn
    monkeypatch.setattr(event_loop, "SLICE_S", 3600.0)
    running = asyncio.create_task(queue.run())

    def part(number: int, size: int) -> Iterator[int]:
        for i in range(size):
            done.append((number, i))
            yield 1

    queue.add(part(0, 3))
    assert len(done) == 3, "a short one is done when it comes"
    for number in range(1, 100):
        queue.add(part(number, number % 70))
    sizes = [len(done)]
    while queue.parts:
        await asyncio.sleep(0)
        sizes.append(len(done))
    assert max(after - before for before, after in itertools.pairwise([0, *sizes])) <= event_loop.SLICE_UNITS
    expected = [(0, i) for i in range(3)] + [
        (number, i) for number in range(1, 100) for i in range(number % 70)
    ]
    assert done == expected
    running.cancel()
