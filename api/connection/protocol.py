"""HTTP protocol: uvicorn's on h11, with the bounds of what a connection may cost, and TGI's error object for
requests that it cannot read and that reach no route.
"""

import asyncio
import http
import uuid
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from api.connection.limits import LIMITS, RESERVED_HEAD_S, ConnectionLimits, serve_reserved
from api.connection.request_reader import UNREADABLE, RequestReader
from api.errors import ApiError, tgi
from api.http.raw_send import CYCLE
from api.http.request_id import HEADER
from api.http.unread import UNREAD, Unread, UnreadAnswers
from api.json import to_json

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
