"""A fleet whose primary is killed, or becomes a replica, under streams: they have every token once."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from common.broker.client import connect
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from tests.support.broker.failovers import Replicated, Watched, replicated, secured
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load

MAX_NEW_TOKENS = 60
SETTINGS = {"dtype": "float32", "debug_kv": True, "kv_cache_bytes": "64MiB"}


@pytest.mark.slow
@pytest.mark.parametrize("make", [secured, replicated])
async def test_streams_outlive_a_failover(
    make: Callable[[], AbstractContextManager[Watched | Replicated]],
) -> None:
    """Behind a sentinel when the primary is killed; and behind a proxy when it becomes a replica, to which
    connections that were opened before lead for ever. No worker is restarted then.
    """
    with make() as service, Fleet(redis_url=service.url, **SETTINGS) as fleet:
        ids = await Load(fleet, MAX_NEW_TOKENS, 4).whole()
        before = await workers(service.url)
        load = Load(fleet, MAX_NEW_TOKENS, 4)
        await load.progress(10)
        service.fail_over()
        assert load.running
        assert await load.whole() == ids
        assert await Load(fleet, MAX_NEW_TOKENS, 4).whole() == ids
        assert isinstance(service, Watched) or await workers(service.url) == before


async def workers(url: str) -> list[str]:
    async with PoolClient(connect(url), Keys("default")) as pool:
        return await pool.workers()
