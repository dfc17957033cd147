"""Sentinel: its URL, and both clients after a failover."""

import contextlib
from collections.abc import Callable

import pytest
from redis.asyncio import Redis

from common.broker import client as access
from common.broker import client as sentinel
from common.broker.client import SerialClient
from common.settings.settings import SettingError
from tests.support.broker.secured import secured
from tests.support.broker.sentinels import Watched, watched
from tests.support.broker_state import KEYS
from tests.support.waiting import wait_until

NEWS = KEYS.events("g")
TLS_OPTIONS = "ssl_ca_certs=/ca.pem&sentinel_password=watch"


async def test_its_url_names_sentinels_service_database_and_options() -> None:
    url = f"rediss+sentinel://me:p%40ss@a,[::1]:7000/fleet/3?{TLS_OPTIONS}"
    client = sentinel.connect_to_primary(url)
    pool = client.connection_pool
    assert isinstance(pool, sentinel.SentinelPool)
    given = {
        name: pool.connection_kwargs.get(name) for name in ("username", "password", "db", "ssl_ca_certs")
    }
    assert given == {"username": "me", "password": "p@ss", "db": 3, "ssl_ca_certs": "/ca.pem"}
    assert pool.service_name == "fleet"
    watchers = [one.connection_pool.connection_kwargs for one in pool.sentinel_manager.sentinels]
    assert [(one["host"], one["port"]) for one in watchers] == [("a", 26379), ("::1", 7000)]
    assert {(one["username"], one["password"], one["ssl_ca_certs"]) for one in watchers} == {
        (None, "watch", "/ca.pem")
    }


@pytest.mark.parametrize("rest", ["", "host", "/fleet", "host:x/fleet", "a,/fleet"])
async def test_a_url_without_sentinel_or_service_is_refused(rest: str) -> None:
    with pytest.raises(SettingError, match="is not a URL like"):
        await access.check_broker(f"redis+sentinel://:secret@{rest}")


async def set_at_last(client: Redis, fast: SerialClient, value: str) -> bool:
    """Whether both clients have written."""
    with contextlib.suppress(*access.ERRORS):
        await client.hset(KEYS.metrics, "slow", value)  # type: ignore[misc]
        return await fast.execute("HSET", KEYS.metrics, "fast", value) is not None
    return False


@pytest.mark.parametrize("make", [pytest.param(watched, marks=pytest.mark.slow), secured])
async def test_both_clients_go_to_the_new_primary_after_a_failover(
    make: Callable[[], contextlib.AbstractContextManager[Watched]],
) -> None:
    """With TLS, certificates of clients and users, too."""
    with make() as service:
        await access.check_broker(service.url)
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
