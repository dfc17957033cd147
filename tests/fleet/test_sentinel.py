"""A fleet over Sentinel whose primary is killed under streams: they go on, and have every token once."""

import contextlib
from collections.abc import Callable

import pytest

from tests.support.broker.secured import secured
from tests.support.broker.sentinels import Watched, watched
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load

MAX_NEW_TOKENS = 60


@pytest.mark.slow
@pytest.mark.parametrize("make", [watched, secured])
async def test_streams_outlive_a_failover(
    make: Callable[[], contextlib.AbstractContextManager[Watched]],
) -> None:
    """With TLS, certificates of clients and users of few rights, too."""
    settings = {"dtype": "float32", "debug_kv": True, "kv_cache_bytes": "64MiB"}
    with make() as service, Fleet(redis_url=service.url, **settings) as fleet:
        ids = await Load(fleet, MAX_NEW_TOKENS, 4).whole()
        load = Load(fleet, MAX_NEW_TOKENS, 4)
        await load.progress(10)
        service.fail_over()
        assert load.running
        assert await load.whole() == ids
