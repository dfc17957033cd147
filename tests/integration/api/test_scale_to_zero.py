"""A pool that may be scaled to zero (SCALE_TO_ZERO): requests wait in the queue until there is a worker."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import yaml

from api.requests.pool import longest_request
from common.settings.settings import Settings
from deploy.launcher.embedded_broker import Broker
from tests.support.api_errors import tgi_error
from tests.support.fleet.batchers import batcher
from tests.support.fleet.gateways import serving
from tests.support.fleet.modeless_worker import modeless_worker
from tests.support.kubernetes.manifests import FOLDER
from tests.support.waiting import wait_until

BODY = {"inputs": "a", "parameters": {"max_new_tokens": 3, "details": True}}
SCALER, *_ = yaml.safe_load_all((FOLDER / "overlays/keda/scaler.yaml").read_text())
LIVE: str = SCALER["spec"]["triggers"][0]["metadata"]["valueLocation"]
"""What the scaler of deploy/kubernetes reads."""


async def is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 200


async def is_equal(read: Callable[[], Awaitable[Any]], expected: Any) -> bool:
    return bool(await read() == expected)


async def has_live(client: httpx.AsyncClient, count: int) -> bool:
    lines = (await client.get("/metrics")).text.splitlines()
    return f"{LIVE} {count:.1f}" in lines


async def test_a_request_to_a_pool_without_workers_waits_for_the_one_that_is_started(broker: Broker) -> None:
    """That holds for a gateway that has never seen a worker, and hours after the last one has gone."""
    with batcher(broker.url):
        async with serving(broker.url, scale_to_zero=True) as (gateway, client):
            await wait_until(lambda: is_ready(client))
            for name in ("w0", "w1"):
                waiting = asyncio.create_task(client.post("/generate", json=BODY))
                await wait_until(lambda: has_live(client, 1))
                async with modeless_worker(broker.url, name) as engine:
                    answer = await waiting
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["details"]["generated_tokens"] == 3
                    await wait_until(lambda: has_live(client, 0))
                    await wait_until(lambda: gateway.pool.workers.ready_s)
                    engine.draining.set()
                    await engine.serving
                gateway.pool.workers.ready_s = gateway.pool.workers.ready_s or 0.0
                gateway.pool.workers.ready_s -= 7200


async def test_a_request_that_waits_has_a_position_in_the_queue(broker: Broker) -> None:
    """More urgent requests are before it, less urgent ones are not."""
    stream = BODY | {"resume_s": 60}
    with batcher(broker.url):
        async with (
            serving(broker.url, scale_to_zero=True) as (_, client),
            contextlib.AsyncExitStack() as stack,
        ):
            await wait_until(lambda: is_ready(client))
            paths = []
            for name in ("batch", "standard", "interactive"):
                sent = client.stream("POST", "/generate_stream", json=stream, headers={"x-priority": name})
                answer = await stack.enter_async_context(sent)
                paths.append(answer.headers["content-location"].removesuffix("/stream"))

            async def positions() -> list[int | None]:
                return [(await client.get(path)).json()["queue_position"] for path in paths]

            await wait_until(lambda: is_equal(positions, [3, 2, 1]))
            async with modeless_worker(broker.url, "w0"):
                await wait_until(lambda: is_equal(positions, [None, None, None]))


async def test_limits_are_the_model_s_until_a_worker_says_its_own(broker: Broker) -> None:
    """A request beyond them is refused at once, though no worker is there to refuse it."""
    with batcher(broker.url):
        async with serving(broker.url, scale_to_zero=True) as (gateway, client):
            await wait_until(lambda: is_ready(client))
            body = {"inputs": "a", "parameters": {"max_new_tokens": 9000}}
            answer = await client.post("/generate", json=body)
            assert tgi_error(answer) == (422, "validation") and "8192" in answer.text
            async with modeless_worker(broker.url, "w0", num_blocks=10):
                await wait_until(lambda: gateway.pool.workers.limits.max_total_tokens == 160)


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        (Settings(), 0),
        (Settings(scale_to_zero=True), 8192),
        (Settings(scale_to_zero=True, max_total_tokens=2048), 2048),
    ],
)
def test_the_longest_request_without_a_worker(settings: Settings, longest: int) -> None:
    assert longest_request(settings) == longest
