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
from common.settings.settings import SettingError
from deploy.launcher.embedded_broker import Broker
from tests.support import brokers
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until

EVICTING = (
    *(f"{which}-{how}" for which in ("allkeys", "volatile") for how in ("lru", "lfu", "random")),
    "volatile-ttl",
)
"""Every value of maxmemory-policy but noeviction."""


async def test_a_broker_that_answers_passes(broker: Broker) -> None:
    await access.check_broker(broker.url)


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        (("--appendonly", "no", "--save", ""), "loses everything when it ends"),
        (
            ("--appendonly", "no", "--save", "60 1"),
            "loses what was written since its last snapshot when it ends",
        ),
        (("--appendonly", "yes"), ""),
    ],
)
async def test_a_broker_without_an_append_only_file_passes_with_a_warning(
    options: tuple[str, ...], lost: str
) -> None:
    with brokers.running(*options) as own:
        warning = await access.check_broker(own.url)
    assert lost in warning and bool(warning) == bool(lost)
    assert not lost or warning.endswith("set `appendonly yes`")


def test_a_user_who_may_not_ask_for_snapshots_is_told_what_may_be_lost() -> None:
    assert "loses what no snapshot has" in access.describe_losses(has_file=False, has_snapshots=None)


async def refusal(url: str) -> str:
    begun_s = time.monotonic()
    with pytest.raises(SettingError) as refused:
        await access.check_broker(url)
    assert time.monotonic() - begun_s < 30
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("REDIS_URL: ")
    return str(refused.value)


async def test_a_closed_port_is_refused() -> None:
    port = free_port()
    assert f"127.0.0.1:{port}: {'Connection refused'}" in await refusal(f"redis://:secret@127.0.0.1:{port}")


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
        await access.check_broker(brokers.with_password(locked.url, "correct"))


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
        await access.check_broker(evicting.url)


@pytest.mark.usefixtures("server")
async def test_a_node_of_a_cluster_is_refused() -> None:
    with brokers.running("--cluster-enabled", "yes", "--cluster-port", str(free_port())) as node:
        assert "node of a Redis Cluster" in await refusal(node.url)


async def test_errors_of_a_running_broker_are_described() -> None:
    with brokers.running() as full:
        async with access.connect(full.url) as client:
            await client.config_set("maxmemory", 1)
            with pytest.raises(access.ERRORS) as refused:
                await client.set("key", "value")
            assert "out of memory" in access.describe_error(refused.value)
            await client.config_set("maxmemory", 0)
            await client.replicaof("127.0.0.1", "1")
            with pytest.raises(access.ERRORS) as refused:
                await client.set("key", "value")
            assert "READONLY" in access.describe_error(refused.value)


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


async def test_a_blocking_read_outlasts_every_client_timeout(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "CONNECT_TIMEOUT_S", 0.3)
    async with access.connect(broker.url) as client:
        await wait_until(lambda: is_connected(client))
        assert await client.xread({"nothing": "$"}, block=700) == []


async def is_connected(client: Redis) -> bool:
    """Now, or already: a busy machine may take longer to connect than its client waits."""
    with contextlib.suppress(*access.ERRORS):
        return bool(await client.ping())
    return False


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
        await access.check_broker(url)
