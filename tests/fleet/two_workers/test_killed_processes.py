"""Processes of a whole fleet are killed, suspended or drained: no stream loses or repeats a token, and what
an answer has beside its tokens stays the same.
"""

import asyncio
import base64
import os
import signal
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from redis.asyncio import Redis

from common.messages.codec import decode
from common.messages.events import Events
from common.process.logs import next_incarnation
from tests.support.answers import post
from tests.support.broker_state import KEYS
from tests.support.fleet.fleet import Fleet
from tests.support.load import PROMPT, Load, timeline
from tests.support.waiting import wait_for, wait_until

NUM_STREAMS, MAX_NEW_TOKENS, ENDLESS = 6, 60, 2000


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> list[list[int]]:
    async def run() -> list[list[int]]:
        return await Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS).whole()

    return asyncio.run(run())


async def two_ready(fleet: Fleet) -> None:
    await wait_until(lambda: fleet.workers_ready() == 2)


async def incarnation_of(redis: Redis, name: str) -> str:
    """Return the incarnation of the worker of that name; empty if the pool has none, or both the old and the
    new one.
    """
    found = [one.decode() for one in await redis.zrange(KEYS.workers, 0, -1) if one.startswith(name.encode())]
    return found[0] if len(found) == 1 else ""


@pytest.mark.slow
async def test_a_suspended_worker_publishes_nothing_when_it_resumes(
    fleet: Fleet, redis: Redis, undisturbed: list[list[int]]
) -> None:
    """It is stopped until its rows run elsewhere. It publishes nothing of what it held, and goes on as its
    next incarnation.
    """
    await two_ready(fleet)
    # before the load begins: a predecessor's place in the pool may take longer to expire than the load runs
    incarnation = await wait_until(lambda: incarnation_of(redis, "w0"))
    load = Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS)
    await load.progress(5)
    pid = fleet.pid("w0")
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]

    async with redis.pubsub() as pubsub:
        await pubsub.psubscribe(KEYS.events("*"))
        for process in processes:
            process.suspend()
        await wait_for(lambda: redis.zscore(KEYS.workers, incarnation), None)
        await load.progress(5)
        while_suspended = await received_events(pubsub)
        for process in processes:
            process.resume()
        assert await wait_until(lambda: incarnation_of(redis, "w0")) == next_incarnation(incarnation)
        assert all(process.is_running() for process in processes)
        after_resuming = await received_events(pubsub)
    assert not [events for events in after_resuming if events.source == incarnation and events.has_events]
    others = [events for events in while_suspended + after_resuming if events.source != incarnation]
    assert any(events.all_tokens for events in others), "other workers publish"
    assert await load.whole() == undisturbed


async def received_events(pubsub: Any) -> list[Events]:
    """Return events that arrived since the last call."""
    events = []
    while (message := await pubsub.get_message(timeout=0)) is not None:
        if message["type"] == "pmessage":
            events.append(decode(Events, message["data"]))
    return events


@pytest.mark.slow
async def test_a_broker_that_lost_everything_costs_no_token_and_no_load_of_the_model(
    fleet: Fleet, redis: Redis, undisturbed: list[list[int]]
) -> None:
    """The workers go on as their next incarnations, over the same engines."""
    await two_ready(fleet)

    def everybody() -> list[int]:
        engines = [engine.pid for name in ("w0", "w1") for engine in fleet.engines(name)]
        return [*fleet.pids().values(), *engines]

    before = everybody()
    load = Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS)
    await load.progress(10)
    await redis.flushall()
    assert await load.whole() == undisturbed
    assert everybody() == before


# --- answers ------------------------------------------------------------------------------------------------

ASKED = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
DRAWN = {"temperature": 0.9, "seed": 11}
KINDS: dict[str, dict[str, Any]] = {
    "beams": {"beam_width": 4, "max_tokens": 60},
    "a seed": DRAWN,
    "a grammar": DRAWN | {"structured_outputs": {"regex": "([a-z]{3} ){60}end"}, "ignore_eos": False},
    "logits": {"return_context_logits": True, "return_generation_logits": True},
    "log-probabilities of the prompt": {"echo": True, "logprobs": 1},
}


def numbers(choice: dict[str, Any]) -> list[float]:
    """All that is a float in a choice."""
    found: list[float] = [choice.get("beam_score") or 0.0]
    found += [one or 0.0 for one in (choice.get("logprobs") or {}).get("token_logprobs", [])]
    for name in ("context_logits", "generation_logits"):
        if name in choice:
            found += np.frombuffer(base64.b64decode(choice[name]["data"]), "<f4").tolist()
    return found


async def running_request(redis: Redis) -> tuple[str, str] | None:
    """The key of the request over HTTP that a worker runs, and the worker."""
    async for key in redis.scan_iter(KEYS.request("*")):
        names = ["gateway", "worker", "terminal"]
        gateway, worker, terminal = await redis.hmget(key, names)  # type: ignore[misc]
        if gateway and worker and not terminal:
            return key.decode(), worker.decode()
    return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_is_the_same_when_its_worker_dies(
    fleet: Fleet, http: httpx.AsyncClient, redis: Redis, kind: str
) -> None:
    body = ASKED | KINDS[kind]
    expected = (await post(http, "/v1/completions", body))["choices"]
    await two_ready(fleet)
    asking = asyncio.create_task(post(http, "/v1/completions", body))
    request, worker = await wait_until(lambda: running_request(redis))

    async def has(what: str) -> bool:
        return what in await timeline(http, request)

    await wait_until(lambda: has("prefilled"))
    os.kill(fleet.pid(worker.split("-")[0]), signal.SIGKILL)
    found = (await asking)["choices"]
    assert [one["token_ids"] for one in found] == [one["token_ids"] for one in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(numbers(one), numbers(other), rtol=1e-3, atol=1e-3)
    await wait_until(lambda: has("died"))
    await wait_for(lambda: redis.keys("tf:*:logits:*"), [])
