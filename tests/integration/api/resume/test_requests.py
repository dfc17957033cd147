"""The state of a request, and its cancel, at any gateway, for its owner alone."""

import asyncio
from typing import Any

import httpx
import pytest

from api.resume import attach
from api.resume.attach import read_committed
from api.streams.stream import Stream
from common.broker import pool_client
from common.broker.pool_client import PoolClient
from common.broker.request_scripts import cancel_request
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.resume.test_resume import LONG, two_gateways
from tests.support.fleet.gateways import nothing_left
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until

OWN = {"authorization": "Bearer own", "x-priority": "interactive", "x-tenant": "acme"}
OTHER = {"authorization": "Bearer other"}
BODY = {"prompt": "Hi", "stream": True, "n": 2}
ENDLESS = Answer(ids(" one two three" * 500), ends=False)


async def states(client: httpx.AsyncClient, request_id: str) -> list[str]:
    """Return the states of the request and of its choices."""
    found = (await client.get(f"/requests/{request_id}", headers=OWN)).json()
    return [found["state"], *(choice["state"] for choice in found["choices"])]


async def test_a_request_is_shown_and_cancelled_at_any_gateway(broker: Broker) -> None:
    async with two_gateways(broker.url, ENDLESS) as (worker, gateway, client, other):
        async with client.stream("POST", "/v1/completions", json=BODY, headers=OWN) as response:
            request_id = response.headers["content-location"].split("/")[2]
            lines = response.aiter_lines()
            await anext(lines)
            path = f"/requests/{request_id}"
            shown = (await other.get(path, headers=OWN)).json()
            assert (shown["id"], shown["priority"], shown["tenant"]) == (request_id, "interactive", "acme")
            assert shown["prompt_tokens"] > 0 and len(shown["choices"]) == 2
            for method in ("GET", "DELETE"):
                assert (await other.request(method, path, headers=OTHER)).status_code == 404
                assert (await other.request(method, path)).status_code == 404
            assert "cancelled" not in await states(other, request_id), "another key cancels nothing"
            cancelled = await other.delete(path, headers=OWN)
            assert cancelled.json()["state"] == "cancelled"
            rest = [line async for line in lines]
        assert any("cancelled" in line for line in rest)
        await nothing_left(gateway, worker)


async def test_a_cancelled_request_is_shown_although_its_reader_has_deleted_it(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancel_and_wait(pool: PoolClient, request_id: str) -> bool:
        is_cancelled = await cancel_request(pool, request_id)
        await wait_until(lambda: is_gone(pool, request_id))
        return is_cancelled

    monkeypatch.setattr(pool_client, "cancel_request", cancel_and_wait)
    async with two_gateways(broker.url, ENDLESS) as (worker, gateway, client, other):
        async with client.stream("POST", "/v1/completions", json=BODY | {"n": 1}, headers=OWN) as response:
            path = f"/requests/{response.headers['content-location'].split('/')[2]}"
            await wait_until(lambda: worker.live and next(iter(worker.live.values())).done > 2)
            cancelled = (await other.delete(path, headers=OWN)).json()
        assert cancelled["state"] == "cancelled"
        assert [choice["state"] for choice in cancelled["choices"]] == ["cancelled"]
        assert cancelled["choices"][0]["generated_tokens"] >= 2
        assert (await other.get(path, headers=OWN)).status_code == 404
        await nothing_left(gateway, worker)


async def is_gone(pool: PoolClient, request_id: str) -> bool:
    return not await pool.redis.exists(pool.keys.request(request_id))


async def test_a_request_that_is_answered_while_it_is_looked_up_is_not_found(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read_late(*admitted: Any) -> list[Stream]:
        streams = await read_committed(*admitted)
        worker.going.set()
        await asking
        await wait_until(lambda: is_gone(gateway.pool.client, request_id))
        return streams

    async with two_gateways(broker.url, LONG) as (worker, gateway, client, other):
        await worker.pause()
        asking = asyncio.create_task(client.post("/generate", json={"inputs": "Hi"}, headers=OWN))
        await wait_until(lambda: gateway.pool.relay.streams)
        [request_id] = gateway.pool.relay.streams
        await wait_until(lambda: gateway.pool.relay.streams[request_id].admitted)
        monkeypatch.setattr(attach, "read_committed", read_late)
        gone = await other.get(f"/requests/{request_id}", headers=OWN)
        assert gone.status_code == 404 and "it was answered" in gone.text


async def test_a_request_waits_then_runs_then_has_finished(broker: Broker) -> None:
    body = {"inputs": "Hi", "resume_s": 600}
    async with two_gateways(broker.url, LONG) as (worker, gateway, client, other):
        await worker.pause()
        asking = asyncio.create_task(client.post("/generate_stream", json=body, headers=OWN))
        await wait_until(lambda: gateway.pool.relay.streams)
        [request_id] = gateway.pool.relay.streams
        await wait_until(lambda: gateway.pool.relay.streams[request_id].admitted)
        assert await states(other, request_id) == ["queued", "queued"]
        worker.going.set()
        await asking
        assert (await client.get("/requests/nothing")).status_code == 404
        assert (await client.delete("/requests/" + "0" * 32)).status_code == 404
