"""HTTP protocol: uvicorn's on h11, with the bounds of what a connection may cost, and TGI's error object for
requests that it cannot read and that reach no route.

Request reader: the requests on one connection, as RFC 9110 and RFC 9112 have them read.

h11 parses; here stand the rules that it leaves to servers, and the bounds of what a request may cost.
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
from api.http.limits import LIMITS, RESERVED_HEAD_S, ConnectionLimits, serve_reserved
from api.http.middleware import HEADER
from api.http.sse import CYCLE
from api.http.unread import UNREAD, Unread, UnreadAnswers
from api.json import to_json

MAX_HEADERS = 128
"""Header fields of a request; each costs some microseconds, however short it is."""
FREE_CHUNKS = 512
BYTES_A_CHUNK = 64
"""A body may come in FREE_CHUNKS chunks, and one more for each BYTES_A_CHUNK of its bytes: a chunk takes as
long as some kilobytes, so a body in chunks of single bytes costs a thousand times what it weighs.
"""
UNREADABLE = "Invalid HTTP request received."
EMPTY_LINES = b"\r\n"

TOO_LARGE, NOT_IMPLEMENTED, VERSION_NOT_SUPPORTED = 431, 501, 505


class Refusal(h11.RemoteProtocolError):
    """A request that h11 would accept; its text is for the client."""


class RequestReader(h11.Connection):
    """Reads requests, and keeps track of the responses.

    Attributes:
        refusal: status and text for a client whose bytes are no HTTP, or not served; None if they are.
    """

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self.max_head_bytes = max_head_bytes
        self.refusal: tuple[int, str] | None = None
        self.chunks = 0
        self.body_bytes = 0

    @property
    def has_unread_bytes(self) -> bool:
        """Whether the client has sent something that is no part of a request yet."""
        return bool(self.trailing_data[0])

    def receive_data(self, data: bytes) -> None:
        """Take bytes of the client. Empty lines before a request are no part of it (RFC 9112, 2.2)."""
        if self.their_state is h11.IDLE and data[:1] in (b"\r", b"\n") and not self.has_unread_bytes:
            data = data.lstrip(EMPTY_LINES)
        if data:  # h11 takes no bytes for the end of the connection
            super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event of a request that is served. Raises h11.RemoteProtocolError; `refusal` says why."""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self.chunks = self.body_bytes = 0
                check_size(event, self.max_head_bytes)
                check_framing(event)
                return served(event)
            if isinstance(event, h11.Data):
                self.count(event)
            return event
        except h11.RemoteProtocolError as error:
            # not the error itself: its traceback holds this reader, and all bytes in it
            text = str(error) if isinstance(error, Refusal) else UNREADABLE
            self.refusal = (error.error_status_hint, text)
            raise

    def count(self, data: h11.Data) -> None:
        self.chunks += data.chunk_start
        self.body_bytes += len(data.data)
        if self.chunks > FREE_CHUNKS + self.body_bytes // BYTES_A_CHUNK:
            raise Refusal(f"The body's chunks are too small: {self.chunks} for {self.body_bytes} bytes")


def check_size(request: h11.Request, max_head_bytes: int) -> None:
    """Raises Refusal for a head beyond its bounds; h11 bounds only those that come in parts."""
    size = len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
    if size > max_head_bytes:
        raise Refusal(f"The request's head is longer than {max_head_bytes} bytes (MAX_HEAD_BYTES)", TOO_LARGE)
    if len(request.headers) > MAX_HEADERS:
        raise Refusal(f"The request has more than {MAX_HEADERS} header fields", TOO_LARGE)


def check_framing(request: h11.Request) -> None:
    """Raises Refusal for a request of which a proxy on its way may have read another length (RFC 9112, 6.1),
    and for one that no origin server serves.
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


def served(request: h11.Request) -> h11.Request:
    """The request as the application sees it: without upgrades, of which none is supported (RFC 9110, 7.8);
    where its target is a whole URL, with the path and the host of that (RFC 9112, 3.2.2). Raises Refusal.
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
    with contextlib.suppress(ValueError):  # of a host between brackets
        url = urlsplit(target)
        if url.scheme.lower() in (b"http", b"https") and url.netloc:
            return url.netloc, (url.path or b"/") + (b"?" + url.query if url.query else b"")
    raise Refusal("The request's target is neither a path nor a URL")


PARTS = {h11.IDLE: "head", h11.SEND_BODY: "body"}
"""The part of a request that a client sends, by its state."""
MAX_DRAINED_BYTES = 16 * 2**20
DRAIN_S = 10.0
"""What is read of a request that is answered or refused already, and for how long: a client that is still
sending reads the answer only if the connection stays open meanwhile (RFC 9112, 9.6).
"""


class HttpProtocol(H11Protocol):
    """One connection of a client.

    Attributes:
        unread: what its client has not read yet; watched by the gateway (`api/http/unread.py`).
        awaited: the part of a request that its client has begun, and has to finish in time.
        is_refused: whether its client was told that its request is not read. No other one is.
        num_drained: bytes of its last request that came after the answer.
    """

    conn: RequestReader
    unread: Unread

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.limits: ConnectionLimits = self.app_state[LIMITS]
        self.unread_answers: UnreadAnswers = self.app_state[UNREAD]
        self.conn = RequestReader(self.limits.max_head_bytes)
        self.ws_protocol_class = None
        self.address = ""
        self.awaited: str | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_refused = False
        self.num_drained = 0

    # --- beginning and end ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.unread = Unread(transport)
        self.unread_answers.connections.add(self.unread)
        self.app_state = {**self.app_state, UNREAD: self.unread}
        self.enter()

    def enter(self) -> None:
        """Take a place among the connections of the gateway."""
        if self.limits.open(self):
            self.expect("head")
        else:
            self.app = partial(serve_reserved, self.app)
            self.expect("head", RESERVED_HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.close(self)
        self.unread_answers.connections.discard(self.unread)
        self.expect(None)
        super().connection_lost(exc)

    def close_unused(self) -> None:
        self.transport.close()

    # --- reading --------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            self.drain(len(data))
            return
        super().data_received(data)
        if self.is_refused:
            return
        self.expect(PARTS.get(self.conn.their_state))
        if self.cycle is not None and self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY:
            self.drain(len(data))

    def handle_events(self) -> None:
        last = self.cycle
        super().handle_events()
        if self.cycle is not None and self.cycle is not last:
            self.limits.use(self)
            self.num_drained = 0
            extensions: dict[str, Any] = {CYCLE: self.cycle}
            self.cycle.scope["extensions"] = extensions

    def on_response_complete(self) -> None:
        """Wait for the next request, unless the client sends no more."""
        super().on_response_complete()
        if self.transport.is_closing() or not self.cycle.response_complete:
            return
        if self.unread.is_half_closed:
            self.transport.close()
        elif self.conn.their_state is h11.SEND_BODY:
            self.expect("body", DRAIN_S)
        else:
            self.limits.unuse(self)
            self.expect("head" if self.conn.has_unread_bytes else None)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that sends no more, but has sent its whole request: it may still
        read. Whoever waits for its disconnect is woken, and finds out whether it does.
        """
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete or self.is_refused:
            return False
        self.unread.is_half_closed = True
        cycle.message_event.set()
        return True

    # --- limits ---------------------------------------------------------------------------------------------

    def expect(self, part: str | None, timeout_s: float | None = None) -> None:
        """Have the client finish the part of a request that it has begun (`head`, `body`) in time. The time
        does not begin anew while that is the same part, unless `timeout_s` is given.
        """
        if part == self.awaited and timeout_s is None:
            return
        if self.timer is not None:
            self.timer.cancel()
        self.awaited, self.timer = part, None
        if part is not None:
            self.timer = self.loop.call_later(timeout_s or self.limits.timeouts_s[part], self.on_late)

    def on_late(self) -> None:
        part, self.awaited = self.awaited, None
        if self.is_refused:
            self.transport.abort()
        elif part == "body" and self.flow.read_paused:
            self.expect(part)  # the client waits for this gateway
        elif part == "body" and self.cycle.response_complete:
            self.limits.refuse("drain")
            self.transport.abort()
        elif part == "body" or self.conn.has_unread_bytes:
            assert part is not None
            self.limits.refuse(part)
            setting = f"{part.upper()}_TIMEOUT_S"
            self.refuse(408, f"The {part} did not come within {self.limits.timeouts_s[part]:g} s ({setting})")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 cannot read, or `RequestReader` does not serve."""
        status, why = self.conn.refusal or (400, UNREADABLE)
        self.limits.refuse("size" if status == 431 else "protocol")
        self.refuse(status, why)

    def refuse(self, status: int, why: str) -> None:
        """Tell the client why its request is not read, and leave it the time to read that: a connection that
        is closed with unread bytes is reset, and the answer is lost.
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
        self.transport.write(whole_response(status, to_json(error)))
        self.is_refused = True
        self.cycle = None  # type: ignore[assignment]
        self.conn = RequestReader(self.limits.max_head_bytes)  # without the bytes that have come
        self.flow.resume_reading()
        self.transport.write_eof()
        self.expect("body", DRAIN_S)

    def drain(self, num_bytes: int) -> None:
        """Read and drop what a client sends of a request that is answered, up to a limit."""
        self.num_drained += num_bytes
        if self.num_drained > MAX_DRAINED_BYTES:
            self.limits.refuse("drain")
            self.transport.abort()


def whole_response(status: int, body: bytes) -> bytes:
    """A response after which the connection is closed."""
    head = [
        f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"{HEADER}: {uuid.uuid4().hex}",
        "connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


class InheritedConnection(HttpProtocol):
    """A connection that ends with the answer on it; another gateway has read the request. What its client
    sends meanwhile (a pipelined request, of which that gateway may have had the first part) is not answered.
    """

    def enter(self) -> None:
        """An inherited connection is within no limit: its client was let in before."""

    def data_received(self, data: bytes) -> None:
        pass

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection: its client sent the whole request, before it came here."""
        self.unread.is_half_closed = True
        if self.cycle is not None:
            self.cycle.message_event.set()
        return True
