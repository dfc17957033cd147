"""Answers of a real fleet are replayed with the same tokens, also those that hopped between workers."""

import asyncio
import sys
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from benchmarks.client import Stream, stream
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.http_calls import PROMPT, post
from tests.support.fleet.live_requests import kill_worker_of, live_requests
from tests.support.waiting import wait_until

NUM_BEFORE, NUM_TOKENS = 6, 60
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


async def replay(http: httpx.AsyncClient, request_id: str) -> Any:
    return await post(http, f"/requests/{request_id}/replay", {})


@pytest.mark.slow
async def test_answers_are_replayed_with_the_same_tokens(
    fleet: Fleet, http: httpx.AsyncClient, subtests: pytest.Subtests
) -> None:
    await wait_until(lambda: fleet.workers_ready() == 2)
    for parameters in ({}, SAMPLED, SAMPLED | {"seed": 7}):
        with subtests.test(parameters=parameters):
            body = {
                "prompt": PROMPT,
                "max_tokens": 24,
                "n": 2,
                "receipt": True,
                "temperature": 0,
            } | parameters
            answer = await post(http, "/v1/completions", body)
            receipt = answer["receipt"]
            assert [choice["seed"] is not None for choice in receipt["choices"]] == [bool(parameters)] * 2
            [build] = receipt["builds"]
            assert len(build["weights_sha256"]) == 64 and build["inexact_because"] is None
            result = await replay(http, receipt["id"])
            assert (result["equal"], result["exact"], result["differences"]) == (True, True, [])


@pytest.mark.slow
async def test_an_answer_whose_worker_was_killed_names_both_and_is_replayed(
    fleet: Fleet, http: httpx.AsyncClient, redis: Redis
) -> None:
    await wait_until(lambda: fleet.workers_ready() == 2)
    reader = Stream()
    parameters = SAMPLED | {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "receipt": True}
    body = {"inputs": PROMPT, "parameters": parameters}
    streaming = asyncio.create_task(stream(f"{fleet.base_url}/generate_stream", body, reader))
    await wait_until(lambda: len(reader.ids) >= NUM_BEFORE)
    [request] = await live_requests(redis)
    await kill_worker_of(redis, request)
    await streaming
    result = await replay(http, request.rpartition(":")[2])
    assert (result["equal"], result["exact"], result["reasons"]) == (True, True, [])
    runs = reader.frames[-1]["details"]["receipt"]["choices"][0]["runs"]
    assert len({run["worker"] for run in runs}) == 2
    assert sum(run["num_tokens"] for run in runs) == NUM_TOKENS
    printed = await run_command("replay", request.rpartition(":")[2], "--url", fleet.base_url)
    assert f"equal, all {NUM_TOKENS} tokens" in printed and "must be the same" in printed


async def run_command(*words: str) -> str:
    """What `tokenfleet` prints; its exit code must be 0."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "deploy.cli", *words), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0, printed
    return printed.decode()
