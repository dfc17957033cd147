"""Acceptor: a flood from one address delays nobody of another, and what waits is bounded."""

import socket
from collections.abc import AsyncIterator

import pytest

from api.http import acceptor as acceptor_module
from api.http.acceptor import MAX_BEGUN, Acceptor
from api.server import own_listener
from tests.support.waiting import wait_until


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


def connect(acceptor: Acceptor, address: str, number: int = 1) -> list[socket.socket]:
    """Connections that the kernel accepts while the event loop does something else."""
    place = acceptor.listeners[0].getsockname()
    return [socket.create_connection(place, source_address=(address, 0)) for _ in range(number)]


async def test_an_address_begins_while_hundreds_of_another_wait(acceptor: Acceptor, begun: Begun) -> None:
    flood = connect(acceptor, "127.0.1.1", 500)
    other = connect(acceptor, "127.0.0.1", 2)
    await wait_until(lambda: len(begun.addresses) == 502)
    last = max(i for i, address in enumerate(begun.addresses) if address == "127.0.0.1")
    assert last < 256 + 2 * MAX_BEGUN, "it is taken in the second turn, and begins soon after that"
    assert not acceptor.waiting and acceptor.num_waiting == 0
    for connection in (*flood, *other):
        connection.close()


async def test_waiting_connections_are_bounded_and_the_longest_queue_loses(
    acceptor: Acceptor, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor_module, "MAX_WAITING", 50)
    other = connect(acceptor, "127.0.0.1", 10)
    flood = connect(acceptor, "127.0.1.1", 200)
    await wait_until(lambda: begun.addresses and not acceptor.num_waiting and not acceptor.beginning)
    assert begun.addresses.count("127.0.0.1") == 10 and len(begun.addresses) < 100
    for connection in (*flood, *other):
        connection.close()


async def test_accepted_connections_begin_when_the_acceptor_closes(acceptor: Acceptor, begun: Begun) -> None:
    waiting = connect(acceptor, "127.0.0.1", 300)
    acceptor.close()
    await wait_until(lambda: not acceptor.beginning)
    assert len(begun.addresses) == 300
    for connection in waiting:
        connection.close()
