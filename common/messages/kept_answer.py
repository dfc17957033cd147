"""Kept answer: what a gateway tells the socket keeper of an answer whose socket it keeps.

Gateway and keeper exchange datagrams on one SOCK_SEQPACKET pair. A gateway sends `KeeperMessage`, with the
socket beside the first one of an answer; the keeper sends `KeptAnswer`, with the socket, to the heir.
"""

import socket
from collections.abc import Iterator
from dataclasses import dataclass

from common.messages.codec import wire_field

MAX_DATAGRAM_BYTES = 32 * 2**10
MAX_ANSWER_BYTES = 24 * 2**10
"""The longest packed answer that the keeper keeps: one datagram holds it and the rest of `KeptAnswer`."""
HANDLE_VARIABLE = "KEEPER_HANDLE"
"""Variable of a gateway's environment: the handle of its end of the channel."""
WHOLE_FLEET_VARIABLE = "WHOLE_FLEET"
"""Variable of a gateway's environment, set by a launcher that runs a whole fleet: when its keeper goes,
nobody else will answer on its port.
"""


@dataclass(frozen=True, slots=True)
class KeptRequests:
    """The requests of an answer, for a broker that has lost them.

    Attributes:
        pool: the name of the one that serves them.
        channel: of their events.
        digests: of each choice's request.
        answer: the packed `HttpAnswer`; it has the requests and their prompts.
        is_kept: whether their answer is kept when their client has left.
    """

    pool: str = wire_field("p")
    channel: str = wire_field("ch")
    digests: list[str] = wire_field("dg")
    answer: bytes = wire_field("a")
    is_kept: bool = wire_field("o", default=False)


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer that has begun on a connection. Its bytes are a function of this and of its tokens.

    Attributes:
        request_id: whose answer it is; a gateway finds in Redis how it is rendered, and offers `requests` to
            a broker that does not know it.
        connection: number of the reader whose connection this is; 0 for the first, another for a client that
            came back.
        num_seen: frames that the client had before, which are not in this answer.
        base: bytes written on the connection before this answer (api/http/sse.py).
        head: its status line and headers as they were written; empty while none are known.
        comment: what keeps the connection of a stream alive.
        comments: offsets in the answer at which it stands.
        headers: of the HTTP request those that the head of the response depends on.
        extra: headers of a whole answer that only the first gateway knows.
        format: which bytes the gateway renders; one with another `format` cannot go on.
        requests: its requests as they were admitted; None where they are too long.
        http_version: of the HTTP request; it decides how the body is framed.
    """

    request_id: str = wire_field("id")
    base: int = wire_field("b")
    format: str = wire_field("f")
    connection: int = wire_field("cn", default=0)
    num_seen: int = wire_field("ns", default=0)
    head: bytes = wire_field("h", default=b"")
    comment: bytes = wire_field("ct", default=b"")
    comments: list[int] = wire_field("c", default_factory=list)
    headers: list[tuple[bytes, bytes]] = wire_field("hd", default_factory=list)
    extra: list[tuple[str, str]] = wire_field("x", default_factory=list)
    requests: KeptRequests | None = wire_field("rq", default=None)
    http_version: str = wire_field("hv", default="1.1")

    @property
    def name(self) -> str:
        """The answer's name between gateway and keeper."""
        return f"{self.request_id}/{self.connection}"


@dataclass(frozen=True, slots=True)
class KeeperMessage:
    """What a gateway tells the keeper: one of these.

    Attributes:
        keep: keep the socket beside this message, or replace what is known of an answer that is kept.
        drop: the answer of this name is done, or its client has gone.
        release: the gateway gives up this answer, so that another goes on with it.
        takes: whether the gateway takes answers of others.
        left: the client of this answer has gone, and its requests go on: they are kept a little longer.
    """

    keep: KeptAnswer | None = wire_field("k", default=None)
    drop: str = wire_field("d", default="")
    release: str = wire_field("r", default="")
    takes: bool | None = wire_field("t", default=None)
    left: str = wire_field("l", default="")


def received(channel: socket.socket) -> Iterator[tuple[bytes, socket.socket | None]]:
    """Yield the datagrams that have come, each with the socket beside it; an empty one at the end."""
    while True:
        try:
            data, handles, _, _ = socket.recv_fds(channel, MAX_DATAGRAM_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            data, handles = b"", []
        yield data, socket.socket(fileno=handles[0]) if handles else None
        if not data:
            return
