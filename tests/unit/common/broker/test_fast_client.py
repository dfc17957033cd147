import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import ConnectionError, ResponseError

from common.broker import client as access
from common.broker.client import ERRORS, FastConnection, SerialClient, connect
from deploy.launcher.embedded_broker import Broker
from tests.support import brokers
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until


@pytest.fixture
def url(broker: Broker) -> str:
    return brokers.open_port(broker.url)


@pytest.fixture
async def client(url: str) -> AsyncIterator[SerialClient]:
    async with connect(url) as redis:
        one = SerialClient(redis)
        yield one
        one.close()


async def identity(client: SerialClient) -> str:
    return str(await client.execute("CLIENT", "ID"))


async def test_an_error_reply_is_raised_and_the_connection_stays(client: SerialClient) -> None:
    before = await identity(client)
    with pytest.raises(ResponseError, match="unknown command"):
        await client.execute("NONSENSE")
    assert await identity(client) == before


async def test_a_lost_connection_is_raised_and_the_next_command_reconnects(
    client: SerialClient, redis: Redis
) -> None:
    before = await identity(client)
    asked = asyncio.create_task(client.execute("BLPOP", "nothing", 0))
    while not (await redis.info("clients"))["blocked_clients"]:  # noqa: ASYNC110 (the broker is asked, no event of ours)
        await asyncio.sleep(0.01)
    await redis.client_kill_filter(_id=before)
    with pytest.raises(ERRORS):
        await asked
    assert await identity(client) != before


OK = b"+OK\r\n"
TOO_MANY = b"-ERR max number of clients reached\r\n"
ENDS = {
    "": ("redis://127.0.0.1:{}/0", b"", "closed by"),
    "unasked": ("redis://127.0.0.1:{}/0", TOO_MANY, "max number of clients"),
    "after_the_password": ("redis://:secret@127.0.0.1:{}/0", OK, "closed by"),
    "in_a_reply_to_the_password": ("redis://:secret@127.0.0.1:{}/0", OK[:3], "closed by"),
    "in_the_first_reply": ("redis://127.0.0.1:{}/0", b"+PO", "closed by"),
    "after_the_database": ("redis://127.0.0.1:{}/3", OK, "closed by"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_connection_that_ends_while_it_opens_is_a_lost_connection(name: str) -> None:
    """With the event loop of the product: that of asyncio told such an end all the same."""
    url, spoken, words = ENDS[name]

    def end_each() -> None:
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as connection:
                    if "unasked" not in name and spoken:
                        connection.recv(1024)
                    connection.sendall(spoken)

    async def try_often() -> set[str]:
        heard = set()
        for _ in range(20):
            client = SerialClient(connect(url.format(server.getsockname()[1])))
            with pytest.raises(ERRORS) as lost:
                await asyncio.wait_for(client.execute("PING"), timeout=10)
            heard.add(str(lost.value))
        return heard

    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        threading.Thread(target=end_each, daemon=True).start()
        heard = uvloop.run(try_often())
        server.shutdown(socket.SHUT_RDWR)
    assert any(words in one for one in heard), heard
    assert "" not in heard, "one has hung"


@contextlib.asynccontextmanager
async def silent_server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The URL of a broker that takes connections and commands, and answers none within the limit."""
    monkeypatch.setattr(access, "ANSWER_S", 0.15)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"


async def test_a_broker_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with silent_server(monkeypatch) as url, connect(url) as redis:
        client = SerialClient(redis)
        with pytest.raises(TimeoutError):
            await client.execute("PING")
        assert not client.is_connected
        answers: list[Any] = []
        await client.connect()
        client.start(answers.append, "PING")
        await wait_until(lambda: answers)
        assert isinstance(answers[0], TimeoutError)
        several = await FastConnection.connect(redis, answers.append)
        several.send_all([("PING",), ("PING",)])
        with pytest.raises(TimeoutError):
            await several.closed
        for url_with_greeting in (url, url.replace("//", "//:secret@")):
            async with connect(url_with_greeting) as ordinary:
                with pytest.raises(TimeoutError):
                    await ordinary.ping()
                with pytest.raises(TimeoutError):
                    await ordinary.set("large", b"x" * 10**8)  # more than the kernel takes


async def test_a_connection_that_owes_nothing_is_kept(
    redis: Redis, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "ANSWER_S", 0.15)
    async with connect(url) as ordinary, ordinary.pubsub() as subscription:
        await subscription.subscribe("here")
        message = asyncio.create_task(next_message(subscription))
        client = SerialClient(ordinary)
        before = await identity(client), await ordinary.client_id()
        held: list[Any] = []
        client.start(held.append, "ECHO", "held")
        await asyncio.sleep(4 * access.ANSWER_S)
        assert held == [b"held"]
        assert (await identity(client), await ordinary.client_id()) == before
        client.close()
        await redis.publish("here", "at last")
        assert await message == b"at last"


async def next_message(subscription: PubSub) -> bytes:
    async for message in subscription.listen():
        if message["type"] == "message":
            return bytes(message["data"])
    return b""


@pytest.mark.parametrize("writes", ["slow", "fast"])
async def test_a_primary_that_became_a_replica_is_left_by_every_connection(writes: str) -> None:
    with brokers.running() as one:
        async with connect(one.url) as redis, connect(one.url) as other:
            client, heard = SerialClient(redis), list[Any]()
            old = await asyncio.gather(*(redis.client_id() for _ in range(3)))
            fast_id = await identity(client)
            await other.replicaof("127.0.0.1", free_port())
            listener = await FastConnection.connect(redis, heard.append)
            listener.send("SUBSCRIBE", "here")
            reader = asyncio.create_task(blocking_read(redis))
            await wait_until(lambda: num_blocked(other))
            with pytest.raises(access.DEMOTED):
                await (redis.set("key", 1) if writes == "slow" else client.execute("SET", "key", 1))
            for closed in (listener.closed, reader):
                with pytest.raises(ERRORS):
                    await closed
            with pytest.raises(ERRORS):
                async with redis.pipeline(transaction=True) as pipe:
                    pipe.set("key", 1)
                    await pipe.execute()
            assert await identity(client) != fast_id
            assert await redis.client_id() not in old
            client.close()


async def blocking_read(redis: Redis) -> None:
    await redis.xread({"nothing": "$"}, block=60_000)


async def num_blocked(redis: Redis) -> int:
    return int((await redis.info("clients"))["blocked_clients"])


async def test_a_reply_to_a_cancelled_command_is_not_taken_for_another(
    client: SerialClient, redis: Redis
) -> None:
    asked = asyncio.create_task(client.execute("BLPOP", "went", 0))
    while not (await redis.info("clients"))["blocked_clients"]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.wait([asked])
    assert await client.execute("ECHO", "next") == b"next"
    await redis.lpush("went", "late")  # type: ignore[misc]
    assert await client.execute("ECHO", "again") == b"again"
    await redis.delete("went")


async def test_a_broker_that_returns_is_connected_again() -> None:
    with brokers.running() as one:
        async with connect(one.url) as redis:
            client = SerialClient(redis)
            assert await client.execute("PING") == b"PONG"
            with pytest.raises(ERRORS):
                await client.execute("SHUTDOWN", "NOSAVE", "NOW")
            with pytest.raises(ERRORS):
                await client.execute("PING")
            again = brokers.start(one)
            assert await client.execute("PING") == b"PONG"
            client.close()
            again.kill()


async def test_a_held_reply_wakes_nobody_until_it_is_polled(client: SerialClient) -> None:
    answers: list[Any] = []
    connection = await client.connect()
    for number in range(3):
        client.start(answers.append, "ECHO", str(number))
        await wait_until(lambda: has_arrived(connection))
        await asyncio.sleep(0)
        assert len(answers) == number
        client.poll()
    assert answers == [b"0", b"1", b"2"]
    assert await client.execute("ECHO", "next") == b"next", "it is not held"


def has_arrived(connection: FastConnection) -> bool:
    """Whether the kernel has something to read."""
    assert connection.socket is not None
    with contextlib.suppress(BlockingIOError):
        return bool(connection.socket.recv(1, socket.MSG_PEEK))
    return False


async def test_a_reply_that_has_not_come_whole_when_it_is_polled_is_taken_as_it_comes(
    client: SerialClient, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = []
    connection = await client.connect()
    client.start(answers.append, "BLPOP", "late", 0)
    client.poll()
    await redis.lpush("late", "now")  # type: ignore[misc]
    await wait_until(lambda: answers == [[b"late", b"now"]])
    monkeypatch.setattr(access, "RECEIVE_BYTES", 3)
    client.start(answers.append, "ECHO", "hello")
    await wait_until(lambda: has_arrived(connection))
    client.poll()
    assert len(answers) == 1
    await wait_until(lambda: answers[1:] == [b"hello"])


async def test_the_end_of_a_connection_is_told_although_replies_are_held(
    client: SerialClient, redis: Redis
) -> None:
    before, answers = await identity(client), list[Any]()
    client.start(answers.append, "BLPOP", "nothing", 0)
    await redis.client_kill_filter(_id=before)
    await wait_until(lambda: bool(answers))
    assert isinstance(answers[0], ConnectionError)
    assert not client.is_connected
