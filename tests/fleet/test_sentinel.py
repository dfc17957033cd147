"""A fleet whose primary is killed, or becomes a replica, under streams: they have every token once."""

import contextlib
from collections.abc import Callable

import pytest

from common.broker.client import connect
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from tests.support.broker.replicas import replicated
from tests.support.broker.secured import secured
from tests.support.broker.sentinels import Watched, watched
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load

MAX_NEW_TOKENS = 60
SETTINGS = {"dtype": "float32", "debug_kv": True, "kv_cache_bytes": "64MiB"}


@pytest.mark.slow
@pytest.mark.parametrize("make", [watched, secured])
async def test_streams_outlive_a_failover(
    make: Callable[[], contextlib.AbstractContextManager[Watched]],
) -> None:
    """With TLS, certificates of clients and users of few rights, too."""
    with make() as service, Fleet(redis_url=service.url, **SETTINGS) as fleet:
        ids = await Load(fleet, MAX_NEW_TOKENS, 4).whole()
        load = Load(fleet, MAX_NEW_TOKENS, 4)
        await load.progress(10)
        service.fail_over()
        assert load.running
        assert await load.whole() == ids


@pytest.mark.slow
async def test_a_fleet_behind_a_proxy_leaves_the_primary_that_became_a_replica() -> None:
    """Connections that the proxy has opened before lead to it for ever."""
    with replicated() as service, Fleet(redis_url=service.url, **SETTINGS) as fleet:
        ids = await Load(fleet, MAX_NEW_TOKENS, 4).whole()
        before = await workers(service.url)
        load = Load(fleet, MAX_NEW_TOKENS, 4)
        await load.progress(10)
        service.fail_over()
        assert load.running
        assert await load.whole() == ids
        assert await Load(fleet, MAX_NEW_TOKENS, 4).whole() == ids
        assert await workers(service.url) == before, "no worker was restarted"


async def workers(url: str) -> list[str]:
    async with PoolClient(connect(url), Keys("default")) as pool:
        return await pool.workers()
