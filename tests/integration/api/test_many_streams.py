"""Many streams at one gateway while messages are lost: every token of each, once."""

import random

import pytest

from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import ready, serving
from tests.support.fleet.scripted_fleet import count_wrong, scripted_fleet


@pytest.mark.parametrize(
    ("num_streams", "num_workers", "num_tokens", "step_s"),
    [
        (60, 8, 30, 0.05),
        pytest.param(3000, 64, 40, 1.0, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
async def test_each_stream_gets_each_token_once(
    broker: Broker, num_streams: int, num_workers: int, num_tokens: int, step_s: float
) -> None:
    chance = random.Random(7)
    async with (
        scripted_fleet(broker.url, num_workers, step_s),
        serving(broker.url, lambda: chance.random() < 0.05, max_concurrent_requests=num_streams) as (
            gateway,
            client,
        ),
    ):
        await ready(gateway)
        assert await count_wrong(str(client.base_url), num_streams, num_tokens) == 0
        assert gateway.pool.relay.filler.num_fills > 1
