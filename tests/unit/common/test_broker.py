"""Brokers that are refused and why, in one line; behind TLS.
What the directory says of a broker's URL, and how a gateway reaches it.
What a process says of an outage of its broker, and of a step that fails again and again.
The directory: what batchers write and gateways read.
Users of the broker: each has the rights of its kind, and no other.
Scripts: their names agree with the functions that call them.
"""

import ast
import asyncio
import contextlib
import errno
import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import uvloop
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import BusyLoadingError, ConnectionError, ResponseError

from api.requests.registry import pool_url, url_at
from common.broker import acl
from common.broker import client as access
from common.broker.client import ERRORS, FailureLog, FastConnection, SerialClient, connect
from common.broker.directory import SILENT_S, TTL_S, DirectoryClient, PoolEntry, address_of
from common.broker.keys import Keys, table
from common.broker.lua import SCRIPTS, call_script, load_script, run_script, script_names
from common.settings.settings import SettingError, Settings
from deploy.launcher.embedded_broker import USERS_FILE, Broker, embedded
from deploy.launcher.prepare import ask_broker
from tests.support import brokers
from tests.support.broker.sentinels import make_certificate, tls_door
from tests.support.broker_state import KEYS
from tests.support.jobs import QUEUE, arq_client, enqueue
from tests.support.machine.clock import Clock
from tests.support.machine.ports import free_port
from tests.support.source_tree import FILES
from tests.support.waiting import wait_until

# --- client -------------------------------------------------------------------------------------------------

EVICTING = (
    *(f"{which}-{how}" for which in ("allkeys", "volatile") for how in ("lru", "lfu", "random")),
    "volatile-ttl",
)
"""Every value of maxmemory-policy but noeviction."""


async def refusal(url: str) -> str:
    begun_s = time.monotonic()
    with pytest.raises(SettingError) as refused:
        await ask_broker(url)
    assert time.monotonic() - begun_s < 30
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("REDIS_URL: ")
    return str(refused.value)


async def test_a_server_that_never_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.launcher.prepare.CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "did not answer in time" in await refusal(f"redis://127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.parametrize(
    ("scheme", "said", "words"),
    [
        ("redis", b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a broker"),
        ("rediss", b"-ERR unknown command\r\n", "no TLS with the broker"),
    ],
)
async def test_another_server_is_called_what_it_is(scheme: str, said: bytes, words: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert words in await refusal(f"{scheme}://127.0.0.1:{port}")


async def test_an_old_broker_is_refused() -> None:
    info = b"redis_version:6.2.14\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():  # *3, then for each word its length and itself
            words = [await reader.readline() for _ in range(2 * int(head[1:]))][1::2]
            writer.write(b"$%d\r\n%b\r\n" % (len(info), info) if words[0] == b"INFO\r\n" else b"+OK\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        assert "Redis 6.2.14; 7.0 or later" in await refusal(
            f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        )


WRONG_URLS = ["http://host", "redis://:secret@host:12x4", "nonsense"] + [
    f"redis+sentinel://:secret@{rest}" for rest in ("", "host", "/fleet", "host:x/fleet", "a,/fleet")
]


@pytest.mark.parametrize("url", WRONG_URLS)
async def test_an_invalid_url_is_refused_without_its_password(url: str) -> None:
    line = await refusal(url)
    assert "is not a URL like redis" in line
    assert "secret" not in line


async def test_wrong_and_missing_passwords_are_refused() -> None:
    with brokers.running("--requirepass", "correct") as locked:
        for url in (brokers.with_password(locked.url, "secret"), locked.url):
            line = await refusal(url)
            assert "refused user name or password" in line
            assert "secret" not in line
        await ask_broker(brokers.with_password(locked.url, "correct"))


@pytest.fixture(params=["", "/usr/bin/redis-server"], ids=["embedded", "redis-server"])
def each_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker of this machine's Redis, too, where it is installed."""
    if request.param:
        if not Path(request.param).exists():
            pytest.skip(f"there is no {request.param}")
        monkeypatch.setenv("TEST_BROKER", request.param)


@pytest.mark.usefixtures("each_server")
async def test_every_policy_but_noeviction_is_refused_by_name() -> None:
    with brokers.running() as evicting:
        async with access.connect(evicting.url) as client:
            for policy in EVICTING:
                await client.config_set("maxmemory-policy", policy)
                line = await refusal(evicting.url)
                assert f"maxmemory-policy is {policy}, which loses keys; set noeviction" in line
            await client.config_set("maxmemory-policy", "noeviction")
        await ask_broker(evicting.url)


@pytest.mark.usefixtures("each_server")
async def test_a_node_of_a_cluster_is_refused() -> None:
    with brokers.running("--cluster-enabled", "yes", "--cluster-port", str(free_port())) as node:
        assert "node of a Redis Cluster" in await refusal(node.url)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), "LOADING"),
        (exceptions.ConnectionError("Connection closed by server."), "no connection"),
        (exceptions.ConnectionError("redis://user:secret@host is away"), "redis://host is away"),
        (exceptions.ConnectionError("redis://user:p@secret@host is away"), "redis://host is away"),
        (TimeoutError(), "did not answer in time"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "Network is unreachable"),
        (exceptions.ResponseError("WRONGTYPE not\nso"), "the broker refused (WRONGTYPE not so)"),
    ],
)
def test_errors_are_described_in_one_line(error: Exception, words: str) -> None:
    assert words in access.describe_error(error)
    assert "secret" not in access.describe_error(error)


async def test_a_command_is_not_repeated_by_the_client(broker: Broker) -> None:
    """A repeated INCR after a lost connection would count twice; the caller decides."""
    async with access.connect(broker.url) as client, access.connect(broker.url) as other:
        identity = await client.client_id()
        blocked = asyncio.ensure_future(client.xread({"nothing": "$"}, block=0))
        await wait_until(lambda: num_blocked(other))
        await other.client_kill_filter(_id=str(identity))
        with pytest.raises(access.ERRORS):
            await blocked


async def test_a_password_may_stand_in_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with brokers.running("--requirepass", "c&rrect") as locked:
        url = f"{locked.url}?password_file={secret}&db=0"
        assert f"cannot read password_file {secret}: No such file" in await refusal(url)
        secret.write_text("\n")
        assert f"password_file {secret} is empty" in await refusal(url)
        secret.write_text("wrong\n")
        assert "refused user name or password" in await refusal(url)
        secret.write_text("c&rrect\n")
        await ask_broker(url)
        async with connect(url) as client:
            await client.config_set("requirepass", "rotated")
            await client.connection_pool.disconnect()
            secret.write_text("")
            with pytest.raises(ConnectionError, match=f"password_file {secret} is empty"):
                await client.ping()
            secret.write_text("rotated\n")
            assert await client.ping(), "a running process reads it at its next connect"


# --- tls ----------------------------------------------------------------------------------------------------


async def test_both_clients_work_behind_a_trusted_certificate(broker: Broker, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    async with tls_door(broker.socket_path, certificate, key) as port:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        await ask_broker(url)
        async with access.connect(url) as redis:
            await redis.set("key", b"x" * 10**6)
            fast = SerialClient(redis)
            assert await fast.execute("GET", "key") == b"x" * 10**6
            answers: list[bytes] = []
            fast.start(answers.append, "ECHO", "not held")
            await wait_until(lambda: answers == [b"not held"])
            fast.close()


async def test_a_certificate_that_is_not_trusted_is_called_that(broker: Broker, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    async with tls_door(broker.socket_path, certificate, key) as port:
        line = await refusal(f"rediss://:secret@127.0.0.1:{port}")
        assert "whose certificate ssl_ca_certs must trust" in line and "CERTIFICATE_VERIFY_FAILED" in line
        assert f"127.0.0.1:{port}" in line and "not permitted" not in line and "secret" not in line


async def test_a_certificate_of_another_host_is_called_that(broker: Broker, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "127.0.0.9")
    async with tls_door(broker.socket_path, certificate, key) as port:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        assert "mismatch" in await refusal(url)
        await ask_broker(f"{url}&ssl_check_hostname=no")


@pytest.mark.parametrize("url", ["rediss://127.0.0.1:{}/0", "rediss+sentinel://127.0.0.1:{}/fleet"])
async def test_a_certificate_that_is_replaced_is_read_at_the_next_connect(
    url: str, broker: Broker, tmp_path: Path
) -> None:
    port = free_port()
    client = connect(url.format(port) + f"?ssl_ca_certs={make_certificate(tmp_path)[0]}")
    for _ in range(2):
        async with tls_door(broker.socket_path, *make_certificate(tmp_path), port):
            with contextlib.suppress(ResponseError):  # a broker is no sentinel
                assert await client.ping()
            await client.aclose()


# --- fast client --------------------------------------------------------------------------------------------


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
    await wait_until(lambda: num_blocked(redis))
    await redis.client_kill_filter(_id=before)
    with pytest.raises(ERRORS):
        await asked
    assert await identity(client) != before


OK = b"+OK\r\n"
TOO_MANY = b"-ERR max number of clients reached\r\n"
ENDS = {
    "": ("redis://127.0.0.1:{}/0", b"", "by"),  # closed by the server or reset by the peer
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
            reader = asyncio.ensure_future(redis.xread({"nothing": "$"}, block=60_000))
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


async def num_blocked(redis: Redis) -> int:
    return int((await redis.info("clients"))["blocked_clients"])


async def test_a_reply_to_a_cancelled_command_is_not_taken_for_another(
    client: SerialClient, redis: Redis
) -> None:
    asked = asyncio.create_task(client.execute("BLPOP", "went", 0))
    await wait_until(lambda: num_blocked(redis))
    asked.cancel()
    await asyncio.wait([asked])
    assert await client.execute("ECHO", "next") == b"next"
    await redis.lpush("went", "late")  # type: ignore[misc]
    assert await client.execute("ECHO", "again") == b"again"
    await redis.delete("went")


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


# --- addresses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://user:secret@host:6379/2", "redis://host:6379/2"),
        ("rediss://:secret@host?ssl_ca_certs=/ca.pem&db=3&password=secret", "rediss://host?db=3"),
        ("unix:///run/redis/socket?password=secret", "unix:///run/redis/socket"),
        ("unix://user:secret@/run/socket", "unix:///run/socket"),
        (
            "redis+sentinel://u:secret@h1:26379,h2/service/1?sentinel_password=secret",
            "redis+sentinel://h1:26379,h2/service/1",
        ),
        ("redis://u:p%40ss%2F@host", "redis://host"),
        ("redis://u:p@secret@host", "redis://host"),
        ("unix://u:p@secret@/run/a@b", "unix:///run/a@b"),
    ],
)
def test_an_address_has_no_credentials(url: str, address: str) -> None:
    assert address_of(url) == address
    assert "secret" not in address


@pytest.mark.parametrize(
    ("address", "own", "url"),
    [
        ("redis://b:6379", "redis://u:secret@a:6379/1", "redis://u:secret@b:6379"),
        ("redis://b", "redis://a", "redis://b"),
        (
            "rediss://b/2",
            "rediss://:secret@a/1?ssl_ca_certs=/ca.pem&db=5",
            "rediss://:secret@b/2?ssl_ca_certs=%2Fca.pem",
        ),
        ("rediss://b", "redis://:secret@a?socket_timeout=3", "rediss://:secret@b"),
        ("redis://a:6379/1", "redis://u:secret@a:6379/1?x=y", "redis://u:secret@a:6379/1?x=y"),
        ("unix:///run/b", "unix:///run/a", "unix:///run/b"),
    ],
)
def test_a_gateway_uses_its_own_credentials(address: str, own: str, url: str) -> None:
    assert url_at(address, own) == url


@pytest.mark.parametrize("address", ["redis://b", "redis+sentinel://b/service"])
def test_a_password_does_not_leave_a_broker_with_tls_for_one_without(address: str) -> None:
    settings = Settings(redis_url="rediss://:secret@a")
    with pytest.raises(SettingError) as refusal:
        pool_url(settings, "other", address)
    assert "POOL_URLS" in str(refusal.value) and "secret" not in str(refusal.value)
    assert url_at(address, "rediss://a") == address


def test_the_url_of_a_pool_may_be_set() -> None:
    settings = Settings.read(
        ["--pool-urls", "b=redis+sentinel://:other@h1,h2:5/service,c=redis://:third@c/0?db=1"],
        {"REDIS_URL": "redis://:own@a"},
    )
    assert pool_url(settings, "b", "redis://elsewhere") == "redis+sentinel://:other@h1,h2:5/service"
    assert pool_url(settings, "c", "redis://elsewhere") == "redis://:third@c/0?db=1"
    assert pool_url(settings, "d", "redis://d") == "redis://:own@d"
    assert Settings.read([], settings.environ()) == settings


@pytest.mark.parametrize("word", ["b", "b=host", "=redis://:secret@b"])
def test_a_pool_without_a_url_is_refused(word: str) -> None:
    with pytest.raises(SettingError, match="POOL_URLS") as refusal:
        Settings.read(["--pool-urls", word], {})
    assert "secret" not in str(refusal.value)


# --- outage -------------------------------------------------------------------------------------------------

AWAY = "no connection to the broker (refused)"
STEPS = [FailureLog(logging.getLogger(), step) for step in ("reading plans", "a flush", "a heartbeat")]


NO = "the broker refused (no)"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Clock:
    caplog.set_level(logging.INFO)
    clock = Clock()
    monkeypatch.setattr(access, "time", clock)
    monkeypatch.setattr(
        access, "OUTAGE", FailureLog(access.log, "the broker", access.SETTLED_S)
    )  # not that of tests before
    return clock


def fail(clock: Clock, seconds: float, steps: list[FailureLog], error: Exception) -> None:
    """Each step fails sixteen times a second."""
    for _ in range(round(seconds * 16)):
        for step in steps:
            with step.caught():
                raise error
        clock.now_s += 1 / 16


def succeed(*steps: FailureLog) -> None:
    """Leave the context by `return`, as most steps do."""
    for step in steps:
        with step.caught():
            continue


def test_an_outage_has_one_line_at_its_beginning_and_one_at_its_end(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    succeed(*STEPS)
    fail(clock, 4.0, STEPS, OSError("refused"))
    fail(clock, 0.5, STEPS, BusyLoadingError())
    succeed(*STEPS)
    clock.now_s += 1.0
    succeed(*STEPS)
    succeed(*STEPS)
    assert caplog.messages == [
        f"the broker failed, trying again: reading plans: {AWAY}",
        "the broker has succeeded again, after 216 failures in 5.5 s",
    ]


def test_a_repeated_cause_is_said_every_minute_and_its_end_is_said(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    failing = FailureLog(logging.getLogger(), "a flush")
    succeed(failing)
    fail(clock, 61.0, [failing], ResponseError("no"))
    succeed(failing)
    succeed(failing)
    assert caplog.messages == [
        f"a flush failed, trying again: {NO}",
        f"a flush failed, trying again: {NO}",
        "a flush has succeeded again, after 976 failures in 61.0 s",
    ]


async def test_a_write_to_a_closed_transport_is_a_lost_connection(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await redis.ping()
    (connection,) = redis.connection_pool._available_connections

    def fail(_: list[bytes]) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    monkeypatch.setattr(connection._writer, "writelines", fail)  # as uvloop's does
    with pytest.raises(ConnectionError):
        await connection.send_command("PING")
    assert await redis.ping()


# --- directory ----------------------------------------------------------------------------------------------

ENTRY = PoolEntry("redis://a:6379", ["mine"], "org/mine", "", 2, 0, 3, 4, 512)


async def age(redis: Redis, seconds: float) -> None:
    await redis.zincrby(Keys.pools, -seconds, "a")


async def test_a_silent_pool_is_not_live_and_leaves_after_an_hour(redis: Redis) -> None:
    directory = DirectoryClient(redis)
    await directory.publish("a", ENTRY)
    await age(redis, SILENT_S + 1)
    assert not (await directory.read())["a"].is_live
    await age(redis, TTL_S)
    await directory.publish("b", ENTRY)
    assert (await directory.read()).keys() == {"b"}
    assert await redis.hkeys(Keys.pool_entries) == [b"b"]  # type: ignore[misc]


async def test_a_name_belongs_to_one_broker_until_that_one_is_silent(redis: Redis) -> None:
    directory = DirectoryClient(redis)
    other = PoolEntry("redis://b:6379")
    await directory.publish("a", ENTRY)
    assert await directory.publish("a", other) == ENTRY.address
    assert (await directory.read())["a"].entry == ENTRY
    await age(redis, SILENT_S + 1)
    assert await directory.publish("a", other) == ""
    assert (await directory.read())["a"].entry == other


async def test_what_cannot_be_read_is_left_out(redis: Redis) -> None:
    directory = DirectoryClient(redis)
    await directory.publish("a", ENTRY)
    await redis.zadd(Keys.pools, {"old": 1, "broken": 1})
    await redis.hset(Keys.pool_entries, mapping={"broken": b"?"})  # type: ignore[misc]
    assert (await directory.read()).keys() == {"a"}


# --- users and scripts --------------------------------------------------------------------------------------

SPOILT_POOL = "a [b]*? \\\"c'"
TEXTS = ("requests", "request:a", "tokens:a", "log:w", "submit", "result:j", "reply:j", "job:j", "responses")
"""Keys that have prompts or answers."""


@pytest.fixture(scope="module", params=["", "/usr/bin/redis-server"], ids=["embedded", "redis-server"])
def users(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker with a user of each kind, none of whom needs a password."""
    if request.param and not Path(request.param).exists():
        pytest.skip(f"there is no {request.param}")
    with pytest.MonkeyPatch.context() as patch, embedded() as broker:
        patch.setenv("TEST_BROKER", request.param)
        lines = [f"user {kind} on nopass {' '.join(acl.rules(kind, ['default']))}" for kind in acl.USERS]
        (broker.directory / USERS_FILE).write_text("\n".join(lines))
        process = brokers.start(broker)
        yield broker
        process.kill()
        process.wait()


def may(broker: Broker, kind: str, *command: str) -> bool:
    """Whether a user of a kind may send a command."""
    with redis.Redis.from_url(broker.url) as client:
        return bool(client.execute_command("ACL", "DRYRUN", kind, *command) == b"OK")


def key(name: str, pool: str = "default") -> str:
    return f"tf:{{{pool}}}:{name}"


@pytest.mark.parametrize("kind", acl.USERS)
def test_every_user_can_connect_and_no_user_can_administer(users: Broker, kind: str) -> None:
    assert may(users, kind, "PING")
    for command in (
        "FLUSHALL",
        "KEYS *",
        "CONFIG GET save",
        "ACL LIST",
        "MONITOR",
        "SCRIPT FLUSH",
        "SHUTDOWN",
    ):
        assert not may(users, kind, *command.split()), command


@pytest.mark.parametrize("kind", acl.USERS)
def test_no_user_reaches_keys_of_others(users: Broker, kind: str) -> None:
    for other in ("session:1", "tf:other", key("requests:places:x")):
        assert not may(users, kind, "GET", other)


@pytest.mark.parametrize("kind", ["batcher", "worker", "service", "arq", "operator"])
def test_all_but_gateways_are_confined_to_their_pool(users: Broker, kind: str) -> None:
    for name in ("requests", "submit", "worker:w", "metrics", "log:w", "arq:queue"):
        for command in (["GET"], ["XLEN"], ["XADD", "*", "a", "b"], ["HGETALL"]):
            assert not may(users, kind, command[0], key(name, "other"), *command[1:])
    assert may(users, "gateway", "XLEN", key("requests", "other"))


def test_a_worker_sees_neither_api_keys_nor_jobs_nor_the_lease(users: Broker) -> None:
    for name in ("tf:keys", key("submit"), key("job:a"), key("result:a"), key("responses")):
        assert not may(users, "worker", "GET", name)
        assert not may(users, "worker", "DEL", name)
    assert not may(users, "worker", "SET", key("batcher"), "me")
    assert not may(users, "worker", "SET", key("epoch"), "9")
    assert may(users, "worker", "HINCRBYFLOAT", "tf:keys:a", "tokens", "1"), "what is not used comes back"
    for kind in ("gateway", "operator"):
        assert may(users, kind, "HSET", "tf:keys", "a", "b"), "admins add keys over HTTP, too"


def test_a_service_submits_and_reads_answers_and_sees_no_other_job(users: Broker) -> None:
    assert may(users, "service", "XADD", key("submit"), "*", "job", "{}")
    assert may(users, "service", "GET", key("result:a"))
    assert may(users, "service", "XREAD", "STREAMS", key("reply:a"), "0")
    assert may(users, "service", "SUBSCRIBE", key("ext:me"))
    assert not may(users, "service", "XREAD", "STREAMS", key("submit"), "0")
    assert not may(users, "service", "XADD", key("reply:a"), "*", "frame", "x")
    assert not may(users, "service", "SUBSCRIBE", key("events:g"))


async def test_a_service_enqueues_and_aborts_jobs_of_arq(users: Broker) -> None:
    async with arq_client(users.url_of("arq")) as client:
        job = await enqueue(client, "generate", "a", _defer_by=3600)
        with pytest.raises(TimeoutError):
            await job.abort(timeout=0.01, poll_delay=0.01)
        assert await client.zscore(QUEUE, job.job_id) == 1, "it is due at once"


def test_a_dashboard_sees_counts_and_no_text(users: Broker) -> None:
    assert may(users, "dashboard", "HGETALL", key("metrics"))
    assert not may(users, "dashboard", "HSET", key("metrics"), "a", "1")
    for name in TEXTS:
        assert not may(users, "dashboard", "XRANGE", key(name), "-", "+")
        assert not may(users, "dashboard", "GET", key(name))
        assert not may(users, "dashboard", "HGETALL", key(name))


@pytest.mark.parametrize("kind", sorted(acl.USERS.keys() - {"replica", "sentinel"}))
def test_any_name_of_a_pool_makes_rules_that_the_broker_takes(users: Broker, kind: str) -> None:
    with redis.Redis.from_url(users.url) as client:
        client.execute_command("ACL", "SETUSER", "spoilt", "reset", *acl.rules(kind, [SPOILT_POOL]))
    name = {"arq": "arq:queue", "service": "result:a"}.get(kind, "workers")
    command = ["GET"] if kind == "service" else ["EXISTS"] if kind == "arq" else ["ZRANGE"]
    rest = ["0", "-1"] if command == ["ZRANGE"] else []
    assert may(users, "spoilt", *command, key(name, SPOILT_POOL), *rest)


def test_every_script_is_called_by_somebody() -> None:
    called = {name for rights in acl.RIGHTS.values() for name in rights.scripts.split()}
    assert called == {name for name in SCRIPTS if not name.startswith("lib/")}


@pytest.mark.parametrize("kind", acl.RIGHTS)
def test_who_calls_a_script_may_use_its_keys(kind: str) -> None:
    users = {name: row.uses.split() for name, row in table()}
    called = acl.RIGHTS[kind].scripts.split()
    needed = {(key, name) for name in called for key in script_names(name)[0].given if key != "process"}
    assert sorted((key, name) for key, name in needed if kind not in users[key]) == []


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("gateway", "~tf:{*}:webhooks:*"),
        ("batcher", "~tf:{default}:webhooks:*"),
        ("worker", "&tf:{default}:events:*"),
        ("gateway", "+psetex"),
        (acl.FLEET, "~tf:{*}:jobs:*"),
    ],
)
async def test_a_process_that_lacks_a_right_is_told_its_name_at_the_start(
    users: Broker, kind: str, lost: str
) -> None:
    """As after an update of Tokenfleet, if the ACL file is an older one."""
    kinds = acl.PROCESSES if kind == acl.FLEET else (kind,)
    await ask_broker(users.url_of(kind), kinds, ["default"])
    await ask_broker(users.url, acl.PROCESSES, ["default", "other"])
    rules = [rule for rule in acl.rules(kind, ["default"]) if rule != lost]
    with redis.Redis.from_url(users.url) as client:
        client.execute_command("ACL", "SETUSER", "old", "reset", "on", "nopass", *rules)
    with pytest.raises(SettingError) as refused:
        await ask_broker(users.url_of("old"), kinds, ["default"])
    assert f"REDIS_URL: the broker's user lacks rights of this version: {lost};" in str(refused.value)


async def test_who_lacks_a_right_is_told_which_in_one_line(users: Broker) -> None:
    with pytest.raises(SettingError, match=r"REDIS_URL: .*lacks a right \(NOPERM: .*info.*--acl"):
        await ask_broker(users.url_of("service"))
    async with access.connect(users.url_of("operator")) as client:
        foreign = call_script("cancel", bool, KEYS, "a", args={"payload": b"", "reader": "", "digest": ""})
        with pytest.raises(access.ERRORS) as refused:
            await run_script(client, foreign)
        line = access.describe_error(refused.value)
        assert "lacks a right (NOPERM: " in line
        assert f"script cancel, keys {KEYS.request('a')} {KEYS.control}" in line
        with pytest.raises(access.ERRORS) as refused:
            await client.eval("return redis.call('SET', KEYS[1], 1)", 1, KEYS.worker("w"))  # type: ignore[misc]
        assert "lacks a right (NOPERM: " in access.describe_error(refused.value)


# --- lua ----------------------------------------------------------------------------------------------------

SCRIPT_TEXTS = {
    "lib/double": "local function double(x) return 2 * x end\n",
    "lib/inc": "-- needs: lib/double\nlocal function inc(x) return double(x) / 2 + 1 end\n",
    "sum": """-- needs: lib/double, lib/inc
-- Double, increment and add.
-- KEYS log, ...
-- ARGV left,
--      right, ...
-- Returns the key, the sum, and the first of the others.
return {log, inc(double(left)) + right, KEYS[first_key], ARGV[first_arg]}
""",
}


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in SCRIPT_TEXTS.items():
        monkeypatch.setitem(SCRIPTS, name, text)


@pytest.mark.usefixtures("texts")
async def test_a_script_has_what_it_needs_and_its_names_whether_or_not_the_broker_knows_it(
    redis: Redis,
) -> None:
    call = call_script(
        "sum", list, KEYS, "a", args={"right": 1, "left": 20}, more_keys=["b"], more_args=["c"]
    )
    for _ in range(2):
        assert await run_script(redis, call) == [KEYS.log("a").encode(), 42, b"b", b"c"]
        await redis.script_flush()


def called_scripts() -> list[str]:
    """Names of the scripts that functions call."""
    calls = [
        node
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "call_script"
    ]
    return [ast.literal_eval(call.args[0]) for call in calls]


@pytest.mark.parametrize("name", sorted(called_scripts()))
def test_a_script_knows_its_keys_and_arguments_by_name_alone(name: str) -> None:
    keys, args = script_names(name)
    assert max(Counter((*keys.given, *args.given)).values(), default=1) == 1
    assert re.findall(r"(?:KEYS|ARGV)\[\d+\]", SCRIPTS[name]) == []
    assert load_script(name).endswith(SCRIPTS[name])
