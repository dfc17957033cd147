"""The socket keeper gives each socket to one gateway at a time, and leaks none."""

import asyncio
import socket
from collections.abc import Iterator

import psutil
import pytest

from common.messages.codec import decode, encode
from common.messages.kept_answer import MAX_DATAGRAM_BYTES, KeeperMessage, KeptAnswer
from deploy.launcher.socket_keeper import SocketKeeper
from tests.support.waiting import PATIENCE_S, wait_until

ANSWERS = [KeptAnswer(f"r{i}", 10 * i, "1", head=b"HTTP/1.1 200 OK") for i in range(40)]
NUM_MORE = 60
"""So many long answers are more than a channel holds at once."""


class FakeGateway:
    """The other end of a channel, with the sockets of its clients."""

    def __init__(self, keeper: SocketKeeper) -> None:
        self.channel = keeper.open_channel()
        self.channel.setblocking(False)

    def send(self, message: KeeperMessage, beside: socket.socket | None = None) -> None:
        socket.send_fds(self.channel, [encode(message)], [beside.fileno()] if beside else [])

    def keep(self, answer: KeptAnswer) -> socket.socket:
        """Has one end of a connection kept; the client's end of it."""
        ours, client = socket.socketpair()
        with ours:
            self.send(KeeperMessage(keep=answer), ours)
        return client

    async def inherited(self, count: int) -> dict[str, tuple[KeptAnswer, socket.socket]]:
        found: dict[str, tuple[KeptAnswer, socket.socket]] = {}

        def take() -> bool:
            try:
                data, handles, _, _ = socket.recv_fds(self.channel, MAX_DATAGRAM_BYTES, 1)
            except BlockingIOError:
                return False
            answer = decode(KeptAnswer, data)
            assert answer.request_id not in found
            found[answer.request_id] = answer, socket.socket(fileno=handles[0])
            return len(found) == count

        await wait_until(take)
        return found


@pytest.fixture(autouse=True)
def no_handle_is_left() -> Iterator[None]:
    before = psutil.Process().num_fds()
    yield
    assert psutil.Process().num_fds() <= before


async def keep_some(
    gateway: FakeGateway, keeper: SocketKeeper, answers: list[KeptAnswer]
) -> list[socket.socket]:
    clients = [gateway.keep(answer) for answer in answers]
    await wait_until(lambda: len(keeper.kept) == len(answers))
    return clients


def close_all(*sockets: socket.socket) -> None:
    for one in sockets:
        one.close()


async def test_an_answer_whose_client_has_left_is_kept_a_little_longer() -> None:
    """A gateway that ends in that time has an heir; else it is dropped."""
    keeper = SocketKeeper()
    keeper.left_s = 0.05
    one, other = FakeGateway(keeper), FakeGateway(keeper)
    clients = await keep_some(one, keeper, ANSWERS[:2])
    one.send(KeeperMessage(left="r0/0"))
    await wait_until(lambda: [*keeper.kept] == ["r1/0"])
    keeper.left_s = 3600.0
    one.send(KeeperMessage(left="r1/0"))
    one.channel.close()
    other.send(KeeperMessage(takes=True))
    [(answer, connection)] = (await other.inherited(1)).values()
    assert answer == ANSWERS[1]
    keeper.close()
    close_all(*clients, connection, other.channel)


async def test_a_client_that_comes_under_the_name_of_one_that_has_left_is_kept() -> None:
    """A broker that was restored gives the number of a reader again."""
    keeper = SocketKeeper()
    keeper.left_s = 0.5
    one, other = FakeGateway(keeper), FakeGateway(keeper)
    first, second = await keep_some(one, keeper, ANSWERS[:2])
    left = keeper.kept["r0/0"]
    one.send(KeeperMessage(left="r0/0"))
    await wait_until(lambda: left.has_left)
    returned = other.keep(ANSWERS[0])
    assert await asyncio.to_thread(first.recv, 1) == b""
    one.send(KeeperMessage(left="r1/0"))  # after which the time of the first is over, too
    await wait_until(lambda: "r1/0" not in keeper.kept)
    assert [kept.has_left for kept in keeper.kept.values()] == [False]
    keeper.close()
    assert returned.recv(1) == b""
    close_all(first, second, returned, one.channel, other.channel)


async def test_answers_of_a_gateway_that_ends_are_spread_over_the_others() -> None:
    """Each goes to one of them, with its socket and what was said of it last; an heir's own go on, too."""
    keeper = SocketKeeper()
    victim, *heirs = [FakeGateway(keeper) for _ in range(3)]
    clients = await keep_some(victim, keeper, ANSWERS)
    said_last = KeptAnswer("r7", 70, "1", head=b"HTTP/1.1 200 OK", comments=[15])
    victim.send(KeeperMessage(keep=said_last))
    for heir in heirs:
        heir.send(KeeperMessage(takes=True))
    await wait_until(lambda: sum(channel.takes for channel in keeper.channels) == 2)
    victim.channel.close()
    shares = [await heir.inherited(20) for heir in heirs]
    found = shares[0] | shares[1]
    assert [found[answer.request_id][0] for answer in ANSWERS if answer.request_id != "r7"] == [
        answer for answer in ANSWERS if answer.request_id != "r7"
    ]
    assert found["r7"][0] == said_last
    for i, client in enumerate(clients):
        found[f"r{i}"][1].sendall(b"%d" % i)
        assert client.recv(9) == b"%d" % i
    heirs[0].channel.close()
    moved = await heirs[1].inherited(20)
    assert moved.keys() == shares[0].keys()
    keeper.close()
    everything = [*shares[0].values(), *shares[1].values(), *moved.values()]
    close_all(*clients, heirs[1].channel, *(connection for _, connection in everything))


async def test_an_answer_for_which_no_heir_comes_is_dropped() -> None:
    keeper = SocketKeeper(orphan_s=0.05)
    only = FakeGateway(keeper)
    clients = await keep_some(only, keeper, ANSWERS[:3])
    only.channel.close()
    await wait_until(lambda: not keeper.kept)
    assert [client.recv(1) for client in clients] == [b""] * 3
    close_all(*clients)


async def keep_more_than_a_channel_holds(victim: FakeGateway, keeper: SocketKeeper) -> list[socket.socket]:
    answers = [KeptAnswer(f"r{i}", i, "1", head=bytes(16000)) for i in range(NUM_MORE)]
    clients: list[socket.socket] = []
    while len(clients) < len(answers):
        clients.append(victim.keep(answers[len(clients)]))
        await asyncio.sleep(0)  # the keeper reads
    await wait_until(lambda: len(keeper.kept) == len(answers))
    return clients


async def test_answers_that_are_dropped_need_no_heir() -> None:
    keeper = SocketKeeper()
    victim, heir = FakeGateway(keeper), FakeGateway(keeper)
    clients = await keep_more_than_a_channel_holds(victim, keeper)
    heir.send(KeeperMessage(takes=True))
    await wait_until(lambda: keeper.channels[1].takes)
    waiting = asyncio.create_task(keeper.wait_for_heirs())
    for i in range(NUM_MORE):
        victim.send(KeeperMessage(release=f"r{i}/0"))
    await wait_until(lambda: any(channel.outgoing for channel in keeper.channels))
    for i in range(NUM_MORE):
        victim.send(KeeperMessage(drop=f"r{i}/0"))
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert not keeper.kept
    keeper.close()
    close_all(*clients, victim.channel, heir.channel)


async def test_sockets_beyond_the_limit_are_not_kept() -> None:
    keeper = SocketKeeper()
    keeper.max_sockets = 2
    gateway = FakeGateway(keeper)
    clients = [gateway.keep(answer) for answer in ANSWERS[:3]]
    assert await asyncio.to_thread(clients[2].recv, 1) == b""
    assert [*keeper.kept] == ["r0/0", "r1/0"]
    keeper.close()
    close_all(*clients, gateway.channel)
