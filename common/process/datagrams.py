"""Datagrams: what comes on the channel between a gateway and the socket keeper."""

import socket
from collections.abc import Iterator

from common.messages.kept_answer import MAX_DATAGRAM_BYTES


def received(channel: socket.socket) -> Iterator[tuple[bytes, socket.socket | None]]:
    """The datagrams that are there, each with the socket beside it; an empty one at the channel's end."""
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
