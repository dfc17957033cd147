"""Models that sleep: gateways accept requests for them, which wait until a worker wakes."""

import asyncio
from functools import partial

import httpx
from redis.asyncio import Redis

from common.broker.heartbeat import Heartbeat
from common.broker.keys import SLEEPER, Keys
from common.broker.pool_client import PoolClient
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.batchers import batcher
from tests.support.fleet.gateways import serving
from tests.support.fleet.modeless_worker import modeless_worker
from tests.support.waiting import wait_until

BODY = {"model": "b", "prompt": "a", "max_tokens": 3}
FIELDS: dict[str, str | int] = {
    "state": "asleep",
    "kept_in": "memory",
    "swap_ms": 250,
    "model_id": "smollm2",
    "tokenizer_name": "",
}


async def test_a_request_for_a_sleeping_model_waits_for_its_worker(broker: Broker, redis: Redis) -> None:
    """The gateway finds it by the worker's record, and lists it."""
    pool = PoolClient(redis, Keys("b"))
    sleeping = Heartbeat(pool, SLEEPER, "w9-1", 60.0).sending(0.1, lambda: FIELDS)
    with batcher(broker.url, POOL="b", WORKER_GRACE_S="0.1"):
        async with serving(broker.url) as (_, client):
            assert (await client.post("/v1/completions", json=BODY)).status_code in (404, 503)
            async with sleeping:
                await wait_until(partial(is_listed, client, "b"))
                waiting = asyncio.create_task(client.post("/v1/completions", json=BODY))
                await wait_until(lambda: has_waited(pool))
                async with modeless_worker(broker.url, "w0", pool="b"):
                    answer = await waiting
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["usage"]["completion_tokens"] == 3


async def is_listed(client: httpx.AsyncClient, model: str) -> bool:
    return model in [one["id"] for one in (await client.get("/v1/models")).json()["data"]]


async def has_waited(pool: PoolClient) -> bool:
    """Whether a request waits, for longer than WORKER_GRACE_S: what a sleeping worker decides by."""
    names = ["waiting", "oldest_ms", "due_ms", "waiting_tokens"]
    found = await pool.redis.hmget(pool.keys.state, names)  # type: ignore[misc]
    waiting, oldest_ms, due_ms, tokens = (int(value or 0) for value in found)
    return bool(waiting == 1 and oldest_ms > 300 and due_ms > 1000 and tokens >= 3)


async def test_a_fleet_s_own_models_are_known_without_any_worker(broker: Broker) -> None:
    """MODELS names them: they are listed, asked by short names, too, and shown with what they do."""
    async with serving(broker.url, models=("x/b=smollm2",), scale_to_zero=True) as (gateway, client):
        names = [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
        assert names[-1] == "x/b"
        assert (await gateway.pools.find("b")).settings.pool == "x/b"
        own = PoolClient(gateway.pool.client.redis, Keys("x/b"))
        await Heartbeat(own, SLEEPER, "w0-1", 60.0).send(**FIELDS)
        models = (await client.get("/fleet")).json()["models"]
        assert [one["pool"] for one in models] == ["default", "x/b"]
        assert models[1]["workers"] == [{"state": "asleep", "kept_in": "memory", "swap_s": 0.25}]
