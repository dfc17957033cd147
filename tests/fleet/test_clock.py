"""A fleet whose broker's clock jumps by a quarter of an hour, in both directions: its streams see nothing."""

from pathlib import Path

import pytest

from tests.support.broker.shifted_clock import jumping_broker
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load

QUARTER_S = 900
MAX_NEW_TOKENS = 60


@pytest.mark.slow
async def test_streams_go_on_when_the_broker_s_clock_jumps(tmp_path: Path) -> None:
    settings = {"dtype": "float32", "debug_kv": True, "kv_cache_bytes": "64MiB", "num_batchers": 2}
    with jumping_broker(tmp_path) as broker, Fleet(redis_url=broker.url, **settings) as fleet:
        load = Load(fleet, MAX_NEW_TOKENS, 4)
        for jump_s in (QUARTER_S, -2 * QUARTER_S, QUARTER_S):
            await load.progress(5)
            broker.jump(jump_s)
        assert load.running
        ids = await load.whole()
        assert ids == await Load(fleet, MAX_NEW_TOKENS, 4).whole()
        assert "is sealed" not in fleet.errors()
