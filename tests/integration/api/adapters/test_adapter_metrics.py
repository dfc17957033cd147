"""Metrics of adapters: live requests by name."""

import httpx
import pytest
from redis.asyncio import Redis

from api.admin import routes_metrics
from batcher.housekeeping import count_adapters
from batcher.scheduling.sequence import PlacedRow
from common.adapters import AdapterLoad
from common.messages.codec import encode
from deploy.launcher.embedded_broker import Broker
from tests.support.adapters.fleet import adapter_fleet
from tests.support.fleet.simulated_pool import request
from tests.support.jobs import KEYS


async def lines(client: httpx.AsyncClient, word: str) -> list[str]:
    text = (await client.get("/metrics")).text
    return [line for line in text.splitlines() if word in line and not line.startswith("#")]


async def test_live_requests_are_counted_by_the_adapters_names(
    broker: Broker, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes_metrics, "MAX_ADAPTERS_SHOWN", 2)
    load = AdapterLoad([("idle", 0, 1), ("legal", 2, 0), ("sql", 3, 4)])
    await redis.hset(KEYS.state, mapping={"blocks": 0, "adapters": encode(load)})  # type: ignore[misc]
    async with adapter_fleet(broker.url) as (_, _, client):
        assert sorted(await lines(client, "tokenfleet_adapter_")) == [
            'tokenfleet_adapter_running_requests{adapter="legal",pool="default"} 2.0',
            'tokenfleet_adapter_running_requests{adapter="sql",pool="default"} 3.0',
            'tokenfleet_adapter_waiting_requests{adapter="legal",pool="default"} 0.0',
            'tokenfleet_adapter_waiting_requests{adapter="sql",pool="default"} 4.0',
        ]
        assert await lines(client, "tokenfleet_max_loras") == ['tokenfleet_max_loras{pool="default"} 4.0']


def test_the_batcher_counts_requests_of_all_versions_of_an_adapter_together() -> None:
    sequences = [request(f"r{i}", 20, 4, i) for i in range(4)]
    for sequence, adapter in zip(sequences, ("sql@1", "sql@2", "", "legal@3"), strict=True):
        object.__setattr__(sequence.request, "adapter", adapter)
    sequences[0].row = PlacedRow(1, sequences[0])
    assert count_adapters(sequences) == [("legal", 0, 1), ("sql", 1, 1)]
