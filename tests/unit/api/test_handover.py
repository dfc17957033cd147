"""A draining gateway ends with the last of its requests; the client of each answer has every byte once. The
socket keeper gives each socket to one gateway at a time, and leaks none.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from api.app import own_listener
from api.handover import answer_socket
from api.handover.answer_socket import KeeperChannel, RestOfAnswer
from api.handover.draining import GatewayServer
from common.messages.codec import decode, encode
from common.messages.kept_answer import MAX_DATAGRAM_BYTES, KeeperMessage, KeptAnswer
from deploy.launcher.socket_keeper import SocketKeeper
from tests.support.waiting import PATIENCE_S, wait_until

# --- draining -----------------------------------------------------------------------------------------------

END_S = 30.0


class SlowApp:
    """Answers /slow when `finished` is set, any other path at once."""

    def __init__(self) -> None:
        self.finished = asyncio.Event()
        self.num_slow = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            self.num_slow += 1
            await self.finished.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


@contextlib.asynccontextmanager
async def serving(
    app: SlowApp, timeout_s: float, is_last: bool = False
) -> AsyncIterator[tuple[GatewayServer, asyncio.Task[None], str]]:
    listener = own_listener(0)
    config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = GatewayServer(config, KeeperChannel(None), timeout_s, is_last=is_last)
    task = asyncio.create_task(server.serve([listener]))
    await wait_until(lambda: server.started)
    host, port = listener.getsockname()
    try:
        yield server, task, f"http://{host}:{port}"
    finally:
        server.should_exit = True
        server.signalled.set()
        await task


def request_on(url: str) -> socket.socket:
    """A connection with a request on it, which the server's loop had no turn to take."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(b"GET /other HTTP/1.1\r\nhost: x\r\n\r\n")
    connection.setblocking(False)
    return connection


async def test_a_draining_server_serves_what_the_kernel_has_accepted_and_no_more() -> None:
    app, loop = SlowApp(), asyncio.get_running_loop()
    async with serving(app, 60) as (server, task, url), httpx.AsyncClient() as client:
        slow = asyncio.create_task(client.get(f"{url}/slow"))
        await wait_until(lambda: app.num_slow == 1)
        waiting = [request_on(url) for _ in range(5)]
        server.handle_exit(signal.SIGTERM, None)
        assert not await server.on_tick(1)
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/other")
        for connection in waiting:
            assert (await loop.sock_recv(connection, 1000)).startswith(b"HTTP/1.1 200")
            connection.close()
        assert not task.done()
        app.finished.set()
        assert (await slow).text == "done"
        await asyncio.wait_for(asyncio.shield(task), END_S)


async def test_the_last_server_listens_until_its_last_request_is_finished() -> None:
    app = SlowApp()
    async with serving(app, 60, is_last=True) as (server, task, url), httpx.AsyncClient() as client:
        slow = asyncio.create_task(client.get(f"{url}/slow"))
        await wait_until(lambda: app.num_slow == 1)
        server.handle_exit(signal.SIGTERM, None)
        await wait_until(lambda: server.refuses)
        assert (await client.get(f"{url}/other")).text == "done"
        assert not task.done()
        app.finished.set()
        assert (await slow).text == "done"
        await asyncio.wait_for(asyncio.shield(task), END_S)


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
async def test_a_second_ctrl_c_ends_the_drain_and_a_second_sigterm_does_not(
    number: signal.Signals, ends: bool
) -> None:
    """A machine that shuts down sends one, and the launcher another."""
    server = GatewayServer(uvicorn.Config(SlowApp()), KeeperChannel(None), 60)
    for _ in range(2):
        assert not server.should_exit
        server.handle_exit(number, None)
    assert server.should_exit is ends


# --- keeper channel -----------------------------------------------------------------------------------------

ANSWER = KeptAnswer("r0", 0, "1", head=bytes(9000))


def pair() -> tuple[KeeperChannel, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return KeeperChannel(ours), theirs


async def test_messages_that_find_no_room_are_sent_later_in_order() -> None:
    channel, keeper = pair()
    messages = [KeeperMessage(keep=ANSWER, drop=str(i)) for i in range(100)]
    tasks = [asyncio.create_task(channel.send(message)) for message in messages]
    await wait_until(lambda: tasks[0].done())
    assert not tasks[-1].done()
    assert not channel.send_now(KeeperMessage(drop="now"))
    received = [
        decode(KeeperMessage, await asyncio.to_thread(keeper.recv, MAX_DATAGRAM_BYTES)) for _ in tasks
    ]
    assert received == messages
    await asyncio.gather(*tasks)
    assert channel.send_now(KeeperMessage(drop="now"))
    assert decode(KeeperMessage, keeper.recv(MAX_DATAGRAM_BYTES)).drop == "now"
    channel.close()
    keeper.close()


async def test_nothing_waits_for_a_keeper_that_is_stopped_and_what_it_must_know_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_socket, "TELL_S", 0.05)
    monkeypatch.setattr(answer_socket, "LATE_S", 0.05)
    channel, keeper = pair()
    sent = [KeeperMessage(keep=ANSWER, drop=str(i)) for i in range(100)]
    async with asyncio.timeout(PATIENCE_S):
        for message in sent:
            await channel.tell(message)
        with pytest.raises(TimeoutError, match="does not read"):
            await channel.send(KeeperMessage(drop="new"))
    received = [decode(KeeperMessage, await asyncio.to_thread(keeper.recv, MAX_DATAGRAM_BYTES)) for _ in sent]
    assert received == sent
    await channel.send(KeeperMessage(drop="new"))
    assert decode(KeeperMessage, keeper.recv(MAX_DATAGRAM_BYTES)).drop == "new"
    channel.close()
    keeper.close()


async def test_without_a_keeper_every_message_fails() -> None:
    channel, keeper = pair()
    keeper.close()
    waiting = KeeperChannel(None)
    for one in (channel, waiting):
        with pytest.raises(OSError):
            await one.send(KeeperMessage(drop="r0"))
        assert not one.is_open and not one.is_kept() and not one.send_now(KeeperMessage(drop="r0"))


async def test_a_message_that_is_too_long_fails_alone() -> None:
    channel, keeper = pair()
    with pytest.raises(OSError, match="too long"):
        await channel.send(KeeperMessage(drop="x" * MAX_DATAGRAM_BYTES))
    await channel.send(KeeperMessage(drop="r0"))
    channel.close()
    keeper.close()


# --- rest of answer -----------------------------------------------------------------------------------------

COMMENT_CHUNK = b"4\r\n: \n\n\r\n"
CHUNKS = st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=12)


class Transport:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.data = b""
        self.is_aborted = self.is_closed = False

    def write(self, data: bytes) -> None:
        assert data
        self.data += data

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_closed = True


@given(CHUNKS, st.data())
def test_the_client_has_every_byte_once(chunks: list[bytes], data: Any) -> None:
    """Comments may be between any two chunks, several at one place; the last may not have been written."""
    sent, comments = b"", []
    for chunk in chunks:
        sent += chunk
        for _ in range(data.draw(st.integers(0, 2))):
            comments.append(len(sent))
            sent += COMMENT_CHUNK
    num_written = data.draw(st.integers(0, len(sent)))
    known = [offset for offset in comments if offset <= num_written]
    transport = Transport()
    rest = RestOfAnswer(transport, num_written, COMMENT_CHUNK, known)
    for chunk in chunks:
        rest.write(chunk)
    rest.insert_comments()
    rest.close()
    without_later = b"".join(whole(chunks, known))
    assert sent[:num_written] + transport.data == without_later
    assert transport.is_closed and not transport.is_aborted and not rest.is_behind


def whole(chunks: list[bytes], comments: list[int]) -> list[bytes]:
    pieces: list[bytes] = []
    left = [*comments]
    for chunk in chunks:
        pieces.append(chunk)
        while left and left[0] == sum(map(len, pieces)):
            left.pop(0)
            pieces.append(COMMENT_CHUNK)
    return pieces


def test_an_answer_that_is_rendered_otherwise_is_cut() -> None:
    """A comment within a chunk, or fewer bytes than were written: nothing may follow them."""
    for num_written, comments in ((0, [2]), (99, [])):
        transport = Transport()
        rest = RestOfAnswer(transport, num_written, COMMENT_CHUNK, comments)
        rest.write(b"head")
        rest.write(b"body")
        rest.close()
        assert transport.is_aborted
        assert transport.data in (b"", b"head")


# --- socket keeper ------------------------------------------------------------------------------------------

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
