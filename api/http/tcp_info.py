"""Bytes written: how many bytes this and other processes have given to the kernel on a TCP connection.

The kernel's count is what a killed gateway cannot take with it: bytes in a process's own buffer are in
neither this count nor the connection. Linux only.
"""

import contextlib
import fcntl
import socket
import struct
import sys
import termios

BYTES_ACKED = struct.Struct("<Q")
BYTES_ACKED_AT = 120
"""Where `tcpi_bytes_acked` is in `struct tcp_info` (Linux 4.1 and later)."""
INT = struct.Struct("=i")
STATE_CLOSED = 7
"""`TCP_CLOSE`, in the first byte of `struct tcp_info`."""


def bytes_written(connection: socket.socket) -> int:
    """Bytes written on a connection since it was opened, plus a constant of the connection; what the client
    has acknowledged and what is still in the kernel. Nobody may write meanwhile. Raises OSError.

    Not `bytes_sent - bytes_retrans + notsent_bytes`: a packet that this machine's own queue drops is sent
    anew, is no retransmission, and is counted twice.
    """
    while True:
        acked = bytes_acked(connection)
        queued = bytes_queued(connection)
        if acked == bytes_acked(connection):  # no acknowledgement came in between
            return acked + queued


def bytes_acked(connection: socket.socket) -> int:
    size = BYTES_ACKED_AT + BYTES_ACKED.size
    is_linux = sys.platform == "linux"
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size) if is_linux else b""
    if len(info) < size:
        raise OSError("this kernel does not count the bytes of a connection")
    count: int = BYTES_ACKED.unpack_from(info, BYTES_ACKED_AT)[0]
    return count


def bytes_queued(connection: socket.socket) -> int:
    """SIOCOUTQ: bytes that the client has not acknowledged, sent or not."""
    count: int = INT.unpack(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(INT.size)))[0]
    return count


def is_reset(connection: socket.socket | None) -> bool:
    """Whether the client has refused what was written since it closed the connection."""
    if connection is None or sys.platform != "linux":
        return False
    with contextlib.suppress(OSError):  # no TCP, or closed here
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == STATE_CLOSED
    return False
