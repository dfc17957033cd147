"""Bytes written: the kernel's count is exact while a slow client reads."""

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from api.http.unread import bytes_written


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


def test_every_byte_that_the_kernel_took_is_counted(
    connection: tuple[socket.socket, socket.socket],
) -> None:
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


def test_another_process_counts_the_same_bytes(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    server, client = connection
    base = bytes_written(server)
    copy = server.dup()
    server.sendall(b"abc")
    server.close()
    client.recv(2)
    with copy:
        assert bytes_written(copy) - base == 3


def test_a_socket_that_is_not_tcp_has_no_count() -> None:
    one, other = socket.socketpair()
    with one, other, pytest.raises(OSError):
        bytes_written(one)
