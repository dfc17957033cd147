"""A fleet whose primary is killed under streams: they have every token once."""

import pytest

from tests.support.broker.sentinels import secured
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load

MAX_NEW_TOKENS = 60
SETTINGS = {"dtype": "float32", "debug_kv": True, "kv_cache_bytes": "64MiB"}


@pytest.mark.slow
async def test_streams_outlive_a_failover() -> None:
    """With TLS, certificates of clients and users of few rights."""
    with secured() as service, Fleet(redis_url=service.url, **SETTINGS) as fleet:
        ids = await Load(fleet, MAX_NEW_TOKENS, 4).whole()
        load = Load(fleet, MAX_NEW_TOKENS, 4)
        await load.progress(10)
        service.fail_over()
        assert load.running
        assert await load.whole() == ids
