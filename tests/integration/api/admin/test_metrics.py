"""What a gateway counts, and what it answers to Prometheus."""

import asyncio
from typing import Any

import httpx
import redis

from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.support import brokers
from tests.support.fleet.gateways import answering, serving, stream
from tests.support.fleet.scripted_worker import Answer, FakeWorker
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until

IDS = ids(" the sea is so blue")


def scripted(request: Generate) -> Answer:
    return Answer(IDS, error="" if request.stopping.max_new_tokens != 13 else "the worker says no")


def body(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "The sky", "parameters": parameters}


class Figures:
    """Values of /metrics at the start; a call returns what has been added to a series since."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.before: dict[str, float] = {}

    async def read(self) -> dict[str, float]:
        response = await self.client.get("/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = [line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    async def begin(self) -> "Figures":
        self.before = await self.read()
        return self

    async def added(self, name: str) -> float:
        return (await self.read())[name] - self.before.get(name, 0.0)

    async def until(self, name: str, value: float) -> None:
        async def reached() -> bool:
            return await self.added(name) == value

        await wait_until(reached)


async def test_counts_durations_and_lengths_of_requests(broker: Broker) -> None:
    async with answering(broker.url, scripted, step_s=0.02) as (_, _, client):
        figures = await Figures(client).begin()
        await stream(client, body())
        assert (await client.post("/generate", json=body(max_new_tokens=3))).status_code == 200
        await figures.until("tgi_request_success", 2)
        await figures.until("tgi_request_count", 2)
        for name in (
            "request",
            "request_validation",
            "request_queue",
            "request_inference",
            "request_mean_time_per_token",
        ):
            await figures.until(f"tgi_{name}_duration_count", 2)
        await figures.until("tgi_request_generated_tokens_sum", len(IDS) + 1 + 3)
        await figures.until("tgi_request_input_length_sum", 2 * len(ids("The sky")))
        assert 0.02 * len(IDS) <= await figures.added("tgi_request_duration_sum") <= 20
        ours = 'class="standard",pool="default"'
        await figures.until(f"tokenfleet_time_to_first_token_seconds_count{{{ours}}}", 2)
        await figures.until(f"tokenfleet_inter_token_latency_seconds_count{{{ours}}}", len(IDS) + 2)
        await figures.until(f'tokenfleet_requests_total{{{ours},reason="length"}}', 1)


async def test_failures_are_counted_by_cause(broker: Broker) -> None:
    async with answering(broker.url, scripted, max_concurrent_requests=1) as (worker, _, client):
        figures = await Figures(client).begin()
        assert (await client.post("/generate", json={"inputs": ""})).status_code == 422
        assert (await client.post("/v1/completions", json={"prompt": 5.5})).status_code == 400
        assert (await client.post("/generate", json=body(max_new_tokens=13))).status_code == 424
        assert (await client.post("/fleet/processes/x/kill")).status_code == 403
        await gone(client, worker)
        await figures.until('tgi_request_failure{err="dropped"}', 1)
        await overload(client, worker)
        await figures.until('tgi_request_failure{err="overloaded"}', 1)
        await figures.until('tgi_request_failure{err="validation"}', 2)
        await figures.until('tgi_request_failure{err="generation"}', 1)
        await figures.until("tgi_request_count", 6)


async def gone(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    """Send a request, and disconnect before its answer comes."""
    await worker.pause()
    posting = asyncio.create_task(client.post("/generate", json=body()))
    await wait_until(lambda: worker.redis.xlen(worker.keys.requests))
    num_before = await worker.redis.xlen(worker.keys.control)
    posting.cancel()
    await asyncio.wait([posting])
    await wait_until(lambda: is_longer(worker, num_before))
    worker.going.set()
    await wait_until(lambda: not worker.live)


async def is_longer(worker: FakeWorker, num_before: int) -> bool:
    """Whether a cancel has come."""
    length: int = await worker.redis.xlen(worker.keys.control)
    return length > num_before


async def overload(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    """Send one request more than may be live."""
    await worker.pause()
    async with client.stream("POST", "/generate_stream", json=body()) as first:
        assert (await client.post("/generate", json=body())).status_code == 429
        worker.going.set()
        await first.aread()


async def test_gauges_of_queue_and_workers(broker: Broker) -> None:
    async with answering(broker.url, scripted) as (worker, _, client):
        await worker.pause()
        async with client.stream("POST", "/generate_stream", json=body()):
            found = await Figures(client).read()
            assert found['tokenfleet_workers{pool="default",state="ready"}'] == 1
            assert found["tgi_queue_size"] == found['tokenfleet_live_requests{pool="default"}'] == 1
            assert found["tgi_batch_max_total_tokens"] == 64 * 16
            assert found['tokenfleet_kv_cache_usage_ratio{pool="default"}'] == 0
            assert found['tokenfleet_broker_up{pool="default"}'] == 1
            worker.going.set()
        await worker.announce("draining")
        assert (await Figures(client).read())['tokenfleet_workers{pool="default",state="draining"}'] == 1


async def test_without_a_broker_only_broker_up_is_reported() -> None:
    with brokers.running() as own:
        async with serving(own.url) as (_, client):
            assert (await Figures(client).read())['tokenfleet_broker_up{pool="default"}'] == 1
            shut(own)
            found = await Figures(client).read()
            assert found == {'tokenfleet_broker_up{pool="default"}': 0}


def shut(own: Broker) -> None:
    with redis.Redis.from_url(own.url) as client:
        client.shutdown(nosave=True)
