"""Processes of a whole fleet are killed, suspended or drained: no stream loses or repeats a token."""

import asyncio
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest
from redis.asyncio import Redis

from benchmarks.chaos import strike_under_load
from common.broker.client import connect
from common.broker.keys import Keys
from common.messages.codec import decode
from common.messages.events import Events
from common.process.logs import next_incarnation
from tests.support.chaos.attack import Attack
from tests.support.chaos.clients import Crowd, Tally, make_cases, make_reader
from tests.support.chaos.outcome import Plan
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.http_calls import PROMPT
from tests.support.fleet.resuming import ResumingClient
from tests.support.load import Load, kill_both_workers
from tests.support.sse import frames_of
from tests.support.waiting import wait_until

KEYS = Keys("default")
NUM_STREAMS, MAX_NEW_TOKENS, ENDLESS = 6, 60, 2000
SETTINGS = {
    "num_workers": 2,
    "num_gateways": 1,
    "debug_kv": True,
    "kv_cache_bytes": "128MiB",
    "worker_ttl_s": 3,
    "stopped_grace_s": 0,
}


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> list[list[int]]:
    async def run() -> list[list[int]]:
        return await Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS).whole()

    return asyncio.run(run())


async def two_ready(fleet: Fleet) -> None:
    await wait_until(lambda: fleet.workers_ready() == 2)


KILLS = Plan(
    num_streams=12,
    num_tokens=60,
    num_cases=2,
    counts={"agent": 2, "engine": 2, "batcher": 1},
    spared=("gateway", "jobs", "stop", "set-back"),
)


async def kill_processes(fleet: Fleet, plan: Plan) -> None:
    attack, num_processes = Attack(fleet, fleet.directory, fleet.directory), len(fleet.pids())
    cases = make_cases(plan.seed, plan.num_cases, plan.num_tokens)
    async with make_reader(fleet.base_url, fleet.redis_url, str(plan.seed)) as reader:
        crowd = Crowd(reader, cases, plan.seed, Tally())
        await crowd.learn(plan.num_streams)
        await strike_under_load(plan, crowd, attack)
        await attack.settled(num_processes, plan.counts["agent"])
    assert not crowd.tally.wrong and not attack.lost


@pytest.mark.slow
async def test_killed_processes_cost_no_token_of_a_real_model(fleet: Fleet) -> None:
    """Workers, engines, batcher and broker are killed, and connections are cut."""
    await kill_processes(fleet, replace(KILLS, seed=6, kills=6))


@pytest.mark.slow
async def test_a_suspended_worker_publishes_nothing_when_it_resumes(
    fleet: Fleet, undisturbed: list[list[int]]
) -> None:
    await suspend_and_resume(fleet, undisturbed)


async def incarnation_of(redis: Redis, name: str) -> str:
    """Return the incarnation of the worker of that name; empty if the pool has none, or both the old and the
    new one.
    """
    found = [one.decode() for one in await redis.zrange(KEYS.workers, 0, -1) if one.startswith(name.encode())]
    return found[0] if len(found) == 1 else ""


async def suspend_and_resume(fleet: Fleet, undisturbed: list[list[int]] | None) -> None:
    """Send SIGSTOP to a worker until its rows run elsewhere, then SIGCONT. It publishes nothing of what it
    held, and goes on as its next incarnation.
    """
    await two_ready(fleet)
    redis = connect(fleet.redis_url)
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
        await wait_until(lambda: not_in_pool(redis, incarnation))
        await load.progress(5)
        while_suspended = await received_events(pubsub)
        for process in processes:
            process.resume()
        assert await wait_until(lambda: incarnation_of(redis, "w0")) == next_incarnation(incarnation)
        assert all(process.is_running() for process in processes)
        after_resuming = await received_events(pubsub)
    assert not [events for events in after_resuming if events.source == incarnation and events.has_events]
    assert [
        events
        for events in while_suspended + after_resuming
        if events.source != incarnation and events.all_tokens
    ], "other workers publish"
    ids = await load.whole()
    if undisturbed is not None:
        assert ids == undisturbed
    await redis.aclose()


async def received_events(pubsub: Any) -> list[Events]:
    """Return events that arrived since the last call."""
    events = []
    while (message := await pubsub.get_message(timeout=0)) is not None:
        if message["type"] == "pmessage":
            events.append(decode(Events, message["data"]))
    return events


async def not_in_pool(redis: Redis, incarnation: str) -> bool:
    return await redis.zscore(KEYS.workers, incarnation) is None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["signal", "command"])
async def test_a_drained_worker_costs_no_token(fleet: Fleet, undisturbed: list[list[int]], how: str) -> None:
    await two_ready(fleet)
    load = Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS)
    await load.progress(5)
    old = fleet.pid("w1")
    if how == "signal":
        os.kill(old, signal.SIGTERM)
    else:
        words = [
            str(Path(sys.executable).parent / "tokenfleet"),
            "drain",
            "w1",
            "--redis-url",
            fleet.redis_url,
        ]
        process = await asyncio.create_subprocess_exec(*words)
        assert await process.wait() == 0
    await asyncio.to_thread(fleet.restarted, "w1", old)
    assert await load.whole() == undisturbed


@pytest.mark.slow
async def test_a_killed_gateway_and_a_drained_one_cut_no_stream(
    fleet: Fleet, undisturbed: list[list[int]]
) -> None:
    """The launcher keeps the sockets, so streams go on where they are. One stream is long enough to outlive
    both gateways.
    """
    await two_ready(fleet)
    load, endless = Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS), Load(fleet, ENDLESS, 1)
    for name, number in (("g0", signal.SIGKILL), ("g1", signal.SIGTERM)):
        await asyncio.gather(load.progress(5), endless.progress(5))
        old = fleet.pid(name)
        os.kill(old, number)
        await asyncio.to_thread(fleet.restarted, name, old)
    await endless.progress(5)
    assert await load.whole() == undisturbed
    await wait_until(lambda: len(endless.streams[0].frames) >= MAX_NEW_TOKENS)
    assert [ids[:MAX_NEW_TOKENS] for ids in await endless.cut()] == undisturbed[:1]


@pytest.mark.slow
async def test_a_suspended_bfloat16_worker_publishes_nothing_when_it_resumes() -> None:
    with Fleet(**SETTINGS, dtype="bfloat16") as fleet:
        await suspend_and_resume(fleet, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", ['{"method": "ngram", "num_speculative_tokens": 4}', '{"method": "suffix"}']
)
async def test_killed_workers_that_speculate_have_the_ids_of_those_that_do_not(
    config: str, undisturbed: list[list[int]]
) -> None:
    """An agent, then an engine alone, is killed while rows are ahead of one token a step."""
    with Fleet(**SETTINGS, dtype="float32", threads=1, speculative_config=config) as fleet:
        await two_ready(fleet)
        load = Load(fleet, 2 * MAX_NEW_TOKENS, NUM_STREAMS)
        await kill_both_workers(fleet, load)
        assert [ids[:MAX_NEW_TOKENS] for ids in await load.whole()] == undisturbed
        metrics = f"{fleet.base_url}/metrics"
        for name in (r"tokenfleet_accepted_tokens_total\{.*\}", "tgi_request_skipped_tokens_sum"):
            shown = re.compile(rf"^{name} [1-9]", re.MULTILINE)
            await wait_until(lambda shown=shown: shown.search(httpx.get(metrics).text) is not None)  # type: ignore[misc]


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 40, "ignore_eos": True}}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "logprobs": 2}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 40, "ignore_eos": True, "n": 2},
    ),
]
NUM_FRAMES = (40, 41, 2 * 41 + 1)
"""Frames of each route: one a token; on /v1 also `[DONE]`, in chats also the first chunk of each choice."""


async def test_streams_go_on_at_the_other_gateway(fleet: Fleet, redis: Redis) -> None:
    requests = 2 * REQUESTS
    clients = [ResumingClient(fleet.base_url) for _ in requests]
    reads = [
        asyncio.create_task(client.read(path, body | {"stream": True, "seed": 5}))
        for client, (path, body) in zip(clients, requests, strict=True)
    ]
    await wait_until(lambda: all(client.num_frames > 3 for client in clients))
    gateways = [await redis.hget(key, "gateway") for key in await redis.keys("tf:*:request:*")]  # type: ignore[misc]
    name = next(gateway for gateway in gateways if gateway).decode().split("-")[0]
    os.kill(await asyncio.to_thread(fleet.pid, name), signal.SIGKILL)
    contents = await asyncio.gather(*reads)
    frames = [frames_of(content) for content in contents]
    assert [len(found) for found in frames] == [*2 * NUM_FRAMES]
    assert not any(ordinal for found in frames for ordinal, _ in found), "nobody asked to come back"
    texts = [[said(data) for _, data in found] for found in frames]
    assert texts[:3] == texts[3:]


def said(data: str) -> Any:
    """Strip a frame of what differs between two equal requests."""
    if data == "[DONE]":
        return data
    return {name: value for name, value in orjson.loads(data).items() if name not in ("id", "created")}
