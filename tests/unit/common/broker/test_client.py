"""Brokers that are refused and why, in one line; behind TLS, behind Sentinel."""

import asyncio
import contextlib
import errno
import socket
import time
from pathlib import Path

import pytest
from redis import exceptions
from redis.asyncio import Redis

from common.broker import client as access
from common.broker.client import SerialClient
from common.settings.settings import SettingError
from deploy.launcher.embedded_broker import Broker
from deploy.launcher.prepare import ask_broker
from tests.support import brokers
from tests.support.broker.sentinels import secured
from tests.support.broker.tls import make_certificate, tls_door
from tests.support.broker_state import KEYS
from tests.support.machine.ports import free_port
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
    monkeypatch.setattr(access, "CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "did not answer in time" in await refusal(f"redis://127.0.0.1:{silent.getsockname()[1]}")


async def test_a_server_of_another_protocol_is_refused() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        assert "is not a broker" in await refusal(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")


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


@pytest.mark.parametrize("url", ["http://host", "redis://:secret@host:12x4", "nonsense"])
async def test_an_invalid_url_is_refused_without_its_password(url: str) -> None:
    line = await refusal(url)
    assert "is not a URL like redis://" in line
    assert "secret" not in line


async def test_wrong_and_missing_passwords_are_refused() -> None:
    with brokers.running("--requirepass", "correct") as locked:
        for url in (brokers.with_password(locked.url, "secret"), locked.url):
            line = await refusal(url)
            assert "refused user name or password" in line
            assert "secret" not in line
        await ask_broker(brokers.with_password(locked.url, "correct"))


@pytest.fixture(params=["", "/usr/bin/redis-server"], ids=["embedded", "redis-server"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker of this machine's Redis, too, where it is installed."""
    if request.param:
        if not Path(request.param).exists():
            pytest.skip(f"there is no {request.param}")
        monkeypatch.setenv("TEST_BROKER", request.param)


@pytest.mark.usefixtures("server")
async def test_every_policy_but_noeviction_is_refused_by_name() -> None:
    with brokers.running() as evicting:
        async with access.connect(evicting.url) as client:
            for policy in EVICTING:
                await client.config_set("maxmemory-policy", policy)
                line = await refusal(evicting.url)
                assert f"maxmemory-policy is {policy}, which loses keys; set noeviction" in line
            await client.config_set("maxmemory-policy", "noeviction")
        await ask_broker(evicting.url)


@pytest.mark.usefixtures("server")
async def test_a_node_of_a_cluster_is_refused() -> None:
    with brokers.running("--cluster-enabled", "yes", "--cluster-port", str(free_port())) as node:
        assert "node of a Redis Cluster" in await refusal(node.url)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), "LOADING"),
        (exceptions.ConnectionError("Connection closed by server."), "no connection"),
        (exceptions.ConnectionError("redis://user:secret@host is away"), "redis://host is away"),
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
        while (await other.info("clients"))["blocked_clients"] == 0:  # noqa: ASYNC110 (the broker is asked, no event of ours)
            await asyncio.sleep(0.01)
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
        assert "its certificate is not trusted; ssl_ca_certs=FILE in REDIS_URL names whom to trust" in line
        assert f"127.0.0.1:{port}" in line and "not permitted" not in line and "secret" not in line


async def test_a_certificate_of_another_host_is_called_that(broker: Broker, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "127.0.0.9")
    async with tls_door(broker.socket_path, certificate, key) as port:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        assert "its certificate names another host" in await refusal(url)
        await ask_broker(f"{url}&ssl_check_hostname=no")


async def test_a_broker_without_tls_is_called_that(broker: Broker, tmp_path: Path) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"-ERR unknown command\r\n")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert "no TLS with the broker" in await refusal(f"rediss://127.0.0.1:{port}")


# --- client sentinel ----------------------------------------------------------------------------------------

NEWS = KEYS.events("g")


@pytest.mark.parametrize("rest", ["", "host", "/fleet", "host:x/fleet", "a,/fleet"])
async def test_a_url_without_sentinel_or_service_is_refused(rest: str) -> None:
    with pytest.raises(SettingError, match="is not a URL like"):
        await ask_broker(f"redis+sentinel://:secret@{rest}")


async def set_at_last(client: Redis, fast: SerialClient, value: str) -> bool:
    """Whether both clients have written."""
    with contextlib.suppress(*access.ERRORS):
        await client.hset(KEYS.metrics, "slow", value)  # type: ignore[misc]
        return await fast.execute("HSET", KEYS.metrics, "fast", value) is not None
    return False


async def test_both_clients_go_to_the_new_primary_after_a_failover() -> None:
    """With TLS, certificates of clients and users, too."""
    with secured() as service:
        await ask_broker(service.url)
        async with access.connect(service.url) as client, client.pubsub() as pubsub:
            fast = SerialClient(client)
            await pubsub.subscribe(NEWS)
            await wait_until(lambda: set_at_last(client, fast, "before"))
            await wait_until(lambda: replicated(client))
            service.fail_over()
            await wait_until(lambda: set_at_last(client, fast, "after"))
            assert (await client.info("replication"))["role"] == "master"
            await wait_until(lambda: heard(client, pubsub))
            fast.close()


async def replicated(client: Redis) -> bool:
    """Whether the replica has all. A primary that the machine has stopped for a second is no primary any
    more, and has none.
    """
    with contextlib.suppress(*access.ERRORS, KeyError):
        found = await client.info("replication")
        return bool(found["slave0"]["offset"] >= found["master_repl_offset"])
    return False


async def heard(client: Redis, pubsub: object) -> bool:
    with contextlib.suppress(*access.ERRORS):
        await client.publish(NEWS, "x")
        message = await pubsub.get_message(timeout=0.1)  # type: ignore[attr-defined]
        return message is not None and message["data"] == b"x"
    return False
