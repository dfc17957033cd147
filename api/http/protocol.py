"""HTTP protocol: uvicorn's on h11, with the rules that h11 leaves to servers (RFC 9110, RFC 9112), and bounds
of what a connection may cost.

A request that cannot be read reaches no route: its client gets TGI's error object.
"""

import asyncio
import contextlib
import http
import uuid
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from api.errors import ApiError, tgi
from api.http.connection_limits import (
    MAX_HEAD_BYTES,
    MIN_BODY_BYTES,
    RESERVED_HEAD_S,
    TIMEOUTS_S,
    Connections,
    serve_reserved,
)
from api.http.sse import CONNECTION, CONNECTIONS, CYCLE, Connection
from api.json import to_json
from api.requests.service_terms import REQUEST_ID_HEADER

MAX_HEADERS = 128
"""Header fields of a request; each costs some microseconds, even a short one."""
FREE_CHUNKS = 512
BYTES_A_CHUNK = 64
"""A body may come in FREE_CHUNKS chunks, and one more for each BYTES_A_CHUNK of its bytes: a chunk takes as
long as some kilobytes, however small it is.
"""
REQUEST_PARTS = {h11.IDLE: "head", h11.SEND_BODY: "body"}
"""The part of a request that a client sends, by h11's state of the client."""
MAX_DRAINED_BYTES = 16 * 2**20
DRAIN_S = 10.0
"""How much is read of a request that is answered or refused already, and for how long: a client that is still
sending reads the answer only if the connection stays open meanwhile (RFC 9112, 9.6).
"""
UNREADABLE = "Invalid HTTP request received."
TOO_LARGE, NOT_IMPLEMENTED, VERSION_NOT_SUPPORTED = 431, 501, 505


class Refusal(h11.RemoteProtocolError):
    """A request that h11 accepts and this server refuses; the text is for the client."""


class RequestReader(h11.Connection):
    """Reads the requests of one connection, and keeps track of the responses.

    Attributes:
        refusal: status and text for a client that sent no HTTP, or HTTP that is not served; else None.
        num_chunks, body_bytes: of the request's body so far.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.refusal: tuple[int, str] | None = None
        self.num_chunks = 0
        self.body_bytes = 0

    @property
    def has_unread_bytes(self) -> bool:
        """Whether the client has sent bytes that are not parsed yet."""
        return bool(self.trailing_data[0])

    def receive_data(self, data: bytes) -> None:
        """Parse bytes of the client. Empty lines before a request are skipped (RFC 9112, 2.2)."""
        if self.their_state is h11.IDLE and data[:1] in (b"\r", b"\n") and not self.has_unread_bytes:
            data = data.lstrip(b"\r\n")
        if data:  # for h11 no bytes are the end of the connection
            super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event of h11. Raises h11.RemoteProtocolError if it is not served: `refusal` says why."""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self.num_chunks = self.body_bytes = 0
                check_size(event)
                check_framing(event)
                return served_request(event)
            if isinstance(event, h11.Data):
                self.count(event)
            return event
        except h11.RemoteProtocolError as error:
            # the error itself is not kept: its traceback holds this reader, with all bytes in it
            text = str(error) if isinstance(error, Refusal) else UNREADABLE
            self.refusal = (error.error_status_hint, text)
            raise

    def count(self, data: h11.Data) -> None:
        self.num_chunks += data.chunk_start
        self.body_bytes += len(data.data)
        if self.num_chunks > FREE_CHUNKS + self.body_bytes // BYTES_A_CHUNK:
            raise Refusal(f"The body's chunks are too small: {self.num_chunks} for {self.body_bytes} bytes")


def check_size(request: h11.Request) -> None:
    """Raises Refusal if the head is too large; h11 checks this only if it comes in parts."""
    size = len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
    if size > MAX_HEAD_BYTES:
        raise Refusal(f"The request's head is longer than {MAX_HEAD_BYTES} bytes", TOO_LARGE)
    if len(request.headers) > MAX_HEADERS:
        raise Refusal(f"The request has more than {MAX_HEADERS} header fields", TOO_LARGE)


def check_framing(request: h11.Request) -> None:
    """Raises Refusal if a proxy may have read another length of the request (RFC 9112, 6.1), or if only a
    proxy or another version of HTTP serves it.
    """
    names = {name for name, _ in request.headers}
    if not request.http_version.startswith(b"1."):
        version = request.http_version.decode()
        raise Refusal(f"HTTP/{version} is not served here: use HTTP/1.1", VERSION_NOT_SUPPORTED)
    if request.method == b"CONNECT":
        raise Refusal("CONNECT is not served here: this is no proxy", NOT_IMPLEMENTED)
    if b"transfer-encoding" in names and b"content-length" in names:
        raise Refusal("The request has both Content-Length and Transfer-Encoding")
    if b"transfer-encoding" in names and request.http_version < b"1.1":
        raise Refusal("A request of HTTP/1.0 cannot have Transfer-Encoding")


def served_request(request: h11.Request) -> h11.Request:
    """The request as the application sees it: without the header `Upgrade`, since no upgrade is supported
    (RFC 9110, 7.8). A target that is a whole URL becomes a path and the header `Host` (RFC 9112, 3.2.2).
    Raises Refusal.
    """
    headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
    target = request.target
    if target.startswith((b"/", b"*")):
        if len(headers) == len(request.headers):
            return request
    else:
        host, target = host_and_path(target)
        headers = [(name, host if name == b"host" else value) for name, value in headers]
    version = request.http_version
    return h11.Request(method=request.method, target=target, headers=headers, http_version=version)


def host_and_path(target: bytes) -> tuple[bytes, bytes]:
    """The host of a URL, and its path and query. Raises Refusal."""
    with contextlib.suppress(ValueError):  # from a malformed host between brackets
        url = urlsplit(target)
        if url.scheme.lower() in (b"http", b"https") and url.netloc:
            return url.netloc, (url.path or b"/") + (b"?" + url.query if url.query else b"")
    raise Refusal("The request's target is neither a path nor a URL")


class HttpProtocol(H11Protocol):
    """One connection of a client.

    Attributes:
        connection: as its requests and `connections`, all of the gateway, see it.
        awaited: the part of a request that its client has begun, and must finish in time.
        is_refused: whether its client was told that its request is not read; later ones are not read either.
        num_drained: bytes of its last request that came after the answer.
        num_received: bytes since a part of a request is expected.
    """

    conn: RequestReader
    connection: Connection

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.limits: Connections = self.app_state[CONNECTIONS]
        self.conn = RequestReader()
        self.ws_protocol_class = None
        self.awaited: str | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_refused = False
        self.num_drained = 0
        self.num_received = 0

    # --- beginning and end ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.connection = Connection(transport, self.client[0] if self.client else "")
        self.limits.open.add(self.connection)
        self.app_state = {**self.app_state, CONNECTION: self.connection}
        self.enter()

    def enter(self) -> None:
        """Have the connection counted; one beyond the limits serves only health and metrics."""
        if self.limits.let_in(self.connection):
            self.expect("head")
        else:
            self.app = partial(serve_reserved, self.app)
            self.expect("head", RESERVED_HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.close(self.connection)
        self.limits.open.discard(self.connection)
        self.expect(None)
        super().connection_lost(exc)

    # --- reading --------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            self.drain(len(data))
            return
        self.num_received += len(data)
        super().data_received(data)
        if self.is_refused:
            return
        self.expect(REQUEST_PARTS.get(self.conn.their_state))
        if self.cycle is not None and self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY:
            self.drain(len(data))

    def handle_events(self) -> None:
        last = self.cycle
        super().handle_events()
        if self.cycle is not None and self.cycle is not last:
            self.limits.set_busy(self.connection)
            self.num_drained = 0
            extensions: dict[str, Any] = {CYCLE: self.cycle}
            self.cycle.scope["extensions"] = extensions

    def on_response_complete(self) -> None:
        """Wait for the next request, unless the client sends no more."""
        super().on_response_complete()
        if self.transport.is_closing() or not self.cycle.response_complete:
            return
        if self.connection.is_half_closed:
            self.transport.close()
        elif self.conn.their_state is h11.SEND_BODY:
            self.expect("body", DRAIN_S)
        else:
            self.limits.set_idle(self.connection)
            self.expect("head" if self.conn.has_unread_bytes else None)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that has closed its side after a whole request: it may still read.
        The task that waits for its disconnect is woken, and tests whether it does.
        """
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete or self.is_refused:
            return False
        self.connection.is_half_closed = True
        cycle.message_event.set()
        return True

    # --- limits ---------------------------------------------------------------------------------------------

    def expect(self, part: str | None, timeout_s: float | None = None) -> None:
        """Expect that the client finishes this part of its request (`head`, `body`) in time. The time goes on
        while the part is the same, and begins anew if `timeout_s` is given.
        """
        if part == self.awaited and timeout_s is None:
            return
        if self.timer is not None:
            self.timer.cancel()
        self.awaited, self.timer, self.num_received = part, None, 0
        if part is not None:
            self.timer = self.loop.call_later(timeout_s or TIMEOUTS_S[part], self.on_late)

    def on_late(self) -> None:
        part, self.awaited = self.awaited, None
        if self.is_refused:
            self.transport.abort()
        elif part == "body" and (self.flow.read_paused or self.num_received >= MIN_BODY_BYTES):
            self.expect(part)  # the client waits for this gateway, or a large file comes
        elif part == "body" and self.cycle.response_complete:
            self.limits.count_cut("drain")
            self.transport.abort()
        elif part == "body" or self.conn.has_unread_bytes:
            assert part is not None
            self.limits.count_cut(part)
            self.refuse(408, f"The {part} did not come within {TIMEOUTS_S[part]:g} s")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that h11 cannot read, or that RequestReader refuses."""
        status, why = self.conn.refusal or (400, UNREADABLE)
        self.limits.count_cut("size" if status == 431 else "protocol")
        self.refuse(status, why)

    def refuse(self, status: int, why: str) -> None:
        """Tell the client why its request is not read, and keep the connection until it has read this:
        closing a connection with unread bytes resets it, and the answer is lost.
        """
        cycle = self.cycle
        is_answered = cycle is not None and cycle.response_complete
        if cycle is not None and not is_answered:
            cycle.disconnected = True
            cycle.message_event.set()
        if cycle is not None and cycle.response_started and (self.awaited == "body" or not is_answered):
            self.transport.close()  # an answer to this request has begun
            return
        _, error = tgi(ApiError(status, http.HTTPStatus(status).phrase.lower().replace(" ", "_"), why))
        body = to_json(error)
        head = [
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"{REQUEST_ID_HEADER}: {uuid.uuid4().hex}",
            "connection: close",
        ]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.is_refused = True
        self.cycle = None  # type: ignore[assignment]
        self.conn = RequestReader()  # without the bytes that have come
        self.flow.resume_reading()
        self.transport.write_eof()
        self.expect("body", DRAIN_S)

    def drain(self, num_bytes: int) -> None:
        """Count dropped bytes of a request that is answered; cut the connection beyond MAX_DRAINED_BYTES."""
        self.num_drained += num_bytes
        if self.num_drained > MAX_DRAINED_BYTES:
            self.limits.count_cut("drain")
            self.transport.abort()
