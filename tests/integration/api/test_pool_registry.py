"""Pools that clients name by `model`: they are opened when first named, serve requests but no jobs, and
are closed when nobody names them any more.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
from redis.asyncio import Redis

from api.errors import LOADING_S, ApiError
from api.lifecycle import Gateway
from api.requests.pool_registry import IDLE_S
from common.broker.keys import Keys
from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.support.broker.announced import announced
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_until

IDS = ids(" zero one two three")
KEYS = Keys("b")


def answer(_: Generate) -> Answer:
    return Answer(IDS)


@pytest.fixture
async def worker(broker: Broker, redis: Redis) -> AsyncIterator[FakeWorker]:
    """The only worker of pool `b`."""
    async with working(broker.url, TOKENIZER, answer, pool="b") as one, announced(broker.url, "b"):
        yield one


@contextlib.asynccontextmanager
async def gateway_of_default(url: str) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """A gateway whose own pool is `default`."""
    async with answering(url, answer) as (_, gateway, client):
        yield gateway, client


async def complete(client: httpx.AsyncClient, model: str) -> str:
    body = {"model": model, "prompt": "Count.", "max_tokens": 20}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


async def job_consumers(redis: Redis, keys: Keys) -> list[str]:
    if not await redis.exists(keys.submit):
        return []
    groups = [group["name"].decode() for group in await redis.xinfo_groups(keys.submit)]
    return [
        one["name"].decode() for group in groups for one in await redis.xinfo_consumers(keys.submit, group)
    ]


async def test_a_foreign_pool_serves_requests_and_leaves_its_jobs_alone(
    broker: Broker, redis: Redis, worker: FakeWorker
) -> None:
    async with gateway_of_default(broker.url) as (_, client):
        assert await complete(client, "b") == " zero one two three"
        assert len(worker.seen) == 1
        own = Keys("default")
        for keys in (KEYS, own):
            await redis.xadd(keys.submit, {"job": '{"id": "a", "inputs": "Count."}'})
        await wait_until(lambda: redis.exists(own.result("a")))
        assert await job_consumers(redis, own) == ["g0-test"]
        assert await job_consumers(redis, KEYS) == []
        assert len(worker.seen) == 1


async def test_a_model_is_found_by_each_of_its_names(broker: Broker, redis: Redis) -> None:
    names = ("org/small", "tiny")
    async with answering(broker.url, answer, served_model_name=names, model_id="smollm2") as (_, _, client):
        listed = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        assert listed == ["org/small", "tiny"]
        hub_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
        for name in (*names, "small", "smollm2", hub_id, hub_id.split("/")[1], "http://host:3000", "tgi", ""):
            assert await complete(client, name) == " zero one two three"
        refused = await client.post("/v1/completions", json={"model": "gpt-4o", "prompt": "Count."})
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "model_not_found"


async def test_any_name_may_mean_this_model_and_other_pools_keep_theirs(
    broker: Broker, redis: Redis, worker: FakeWorker
) -> None:
    async with answering(broker.url, answer, any_model_name=True) as (own, _, client):
        await complete(client, "gpt-4o")
        assert (len(own.seen), len(worker.seen)) == (1, 0)
        await complete(client, "b")
        assert (len(own.seen), len(worker.seen)) == (1, 1)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def is_shown(redis: Redis) -> bool:
    """Whether the gateway's heartbeat is among the processes of pool `b`."""
    return bool(await redis.exists(KEYS.process("gateway", "g0-test")))


async def test_a_foreign_pool_that_nobody_names_is_closed_and_opens_again(
    broker: Broker, redis: Redis, worker: FakeWorker
) -> None:
    async with gateway_of_default(broker.url) as (gateway, client):
        clock = gateway.pools.clock = Clock()
        await complete(client, "b")
        first = gateway.pools.foreign["b"].pool
        await wait_until(lambda: not first.relay.streams)
        clock.now_s = IDLE_S - 1
        await complete(client, "b")
        await wait_until(lambda: not first.relay.streams)
        clock.now_s = 2 * IDLE_S - 2
        await gateway.pools.close_idle()
        assert gateway.pools.foreign["b"].pool is first and await is_shown(redis)
        num_connections = len(await redis.client_list())
        clock.now_s = 2 * IDLE_S
        await gateway.pools.close_idle()
        assert not gateway.pools.foreign and not await is_shown(redis)
        await wait_until(lambda: fewer_connections(redis, num_connections))
        assert await complete(client, "b") == " zero one two three"
        assert gateway.pools.foreign["b"].pool is not first


async def fewer_connections(redis: Redis, than: int) -> bool:
    return len(await redis.client_list()) < than


async def test_a_foreign_pool_with_a_live_stream_stays_open(
    broker: Broker, redis: Redis, worker: FakeWorker
) -> None:
    async with gateway_of_default(broker.url) as (gateway, client):
        clock = gateway.pools.clock = Clock()
        await worker.pause()
        running = asyncio.create_task(complete(client, "b"))
        await wait_until(
            lambda: "b" in gateway.pools.foreign and gateway.pools.foreign["b"].pool.relay.streams
        )
        clock.now_s = 10 * IDLE_S
        await gateway.pools.close_idle()
        worker.going.set()
        assert await running == " zero one two three"
        await wait_until(lambda: not gateway.pools.foreign["b"].pool.relay.streams)
        await gateway.pools.close_idle()
        assert not gateway.pools.foreign


async def test_a_pool_without_a_live_worker_is_unavailable_and_one_that_nobody_knows_is_not_found(
    broker: Broker, redis: Redis
) -> None:
    async with (
        announced(broker.url, "empty", num_ready=0),
        gateway_of_default(broker.url) as (gateway, client),
    ):
        for model, status, code in (("empty", 503, "unavailable"), ("nobody", 404, "model_not_found")):
            response = await client.post("/v1/completions", json={"model": model, "prompt": "Count."})
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert not gateway.pools.foreign


async def test_a_pool_whose_worker_still_loads_is_asked_for_again_later(broker: Broker, redis: Redis) -> None:
    body = {"model": "b", "prompt": "Count."}
    async with (
        announced(broker.url, "b", num_ready=0, num_loading=1),
        gateway_of_default(broker.url) as (_, client),
    ):
        response = await client.post("/v1/completions", json=body)
        named = await client.post("/v2/models/b/generate", json={"text_input": "Count."})
    assert response.status_code == named.status_code == 503
    assert response.headers["retry-after"] == named.headers["retry-after"] == str(LOADING_S)
    assert response.json()["error"]["code"] == "unavailable"
    assert "the worker of pool b still loads its model" in named.json()["error"]


async def test_a_request_of_a_pool_whose_worker_is_away_is_asked_for_again_later(
    broker: Broker, redis: Redis
) -> None:
    """The request lives on: its client is not told that it does not exist."""
    async with announced(broker.url, "b", num_ready=0), gateway_of_default(broker.url) as (gateway, _):
        with pytest.raises(ApiError) as refusal:
            await gateway.pools.named("b")
        assert (refusal.value.status, refusal.value.error_type) == (503, "unavailable")


async def test_all_pools_of_a_gateway_share_what_it_may_tokenize_at_once(
    broker: Broker, worker: FakeWorker
) -> None:
    async with gateway_of_default(broker.url) as (gateway, _):
        foreign = await gateway.pools.find("b")
        assert foreign is not gateway.pool
        assert foreign.tokenizer.budget is gateway.pool.tokenizer.budget


async def test_a_gateway_that_ends_leaves_its_broker_last(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory is at the same broker: closed with the other pools, it took the connection of jobs."""
    async with answering(broker.url, Answer([])):
        pass
    assert "outage of the broker" not in caplog.text
