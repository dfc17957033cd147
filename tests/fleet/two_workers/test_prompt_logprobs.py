"""Log-probabilities of a prompt are those of transformers, even when a worker dies meanwhile."""

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from common.broker.keys import Keys
from tests.support.engine.reference import prompt_ids, reference_logprobs
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.http_calls import generate, post, sampled_body, timeline
from tests.support.fleet.live_requests import kill_worker_of, live_requests, pid_of, worker_of
from tests.support.prompts import FEW, PROMPTS
from tests.support.waiting import wait_until

KEYS = Keys("default")
NEW_TOKENS = 100
"""Enough tokens that the worker is killed before the last of them."""


@pytest.mark.slow
async def test_prompt_logprobs_equal_transformers_and_survive_the_worker(
    fleet: Fleet, http: httpx.AsyncClient, redis: Redis
) -> None:
    """On every route, alone and in a batch. Another worker does not compute them again."""
    prompt = PROMPTS[FEW[-2]]
    [ids] = prompt_ids([prompt])
    [expected] = reference_logprobs([ids])
    own, likeliest = [[None, *(line[i] for line in expected)] for i in (0, 1)]
    details = {"decoder_input_details": True, "ignore_eos": True}
    echo = {"echo": True, "logprobs": 1, "max_tokens": 0}
    others = [asyncio.create_task(post(http, "/generate", sampled_body(i))) for i in range(4)]
    plain, echoed, *completions = await asyncio.gather(
        generate(http, prompt),
        generate(http, prompt, **details),
        *(post(http, "/v1/completions", echo | {"prompt": one}) for one in (prompt, ids)),
    )
    entry = await redis.xadd(
        KEYS.submit, {"job": json.dumps({"inputs": prompt, "parameters": details | {"max_new_tokens": 2}})}
    )
    job = json.loads(await wait_until(lambda: redis.get(KEYS.result(entry.decode()))))
    await asyncio.gather(*others)
    for found in (echoed["details"], job["details"]):
        assert [token["id"] for token in found["prefill"]] == ids
        assert "".join(token["text"] for token in found["prefill"]) == prompt
        assert [token["logprob"] for token in found["prefill"]] == close(own)
    assert echoed["ids"] == plain["ids"] and plain["details"]["prefill"] == []
    for choice in (completion["choices"][0] for completion in completions):
        assert choice["text"] == prompt and choice["logprobs"]["token_logprobs"] == close(own)
        assert [top and max(top.values()) for top in choice["logprobs"]["top_logprobs"]] == close(likeliest)

    await wait_until(lambda: fleet.workers_ready() == 2)
    task = asyncio.create_task(generate(http, prompt, **details, max_new_tokens=NEW_TOKENS))
    [request] = await wait_until(lambda: live_requests(redis))
    await wait_until(lambda: redis.hexists(request, "prompt"))
    await kill_worker_of(redis, request)
    answer = await task
    assert [token["logprob"] for token in answer["details"]["prefill"]] == close(own)
    assert len(answer["ids"]) == NEW_TOKENS

    async def has_died() -> bool:
        return "died" in await timeline(http, request)

    await wait_until(has_died)


def close(values: list[float | None]) -> list[Any]:
    return [value if value is None else pytest.approx(value, rel=1e-3, abs=1e-3) for value in values]


@pytest.mark.slow
async def test_prompt_logprobs_of_a_worker_that_died_before_the_first_token(
    fleet: Fleet, http: httpx.AsyncClient, redis: Redis
) -> None:
    """Another worker computes all of them."""
    prompt = PROMPTS[FEW[-2]]
    [expected] = reference_logprobs(prompt_ids([prompt]))
    await wait_until(lambda: fleet.workers_ready() == 2)
    pids = [fleet.pid("w0"), fleet.pid("w1")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    task = asyncio.create_task(generate(http, prompt, decoder_input_details=True))
    [request] = await wait_until(lambda: live_requests(redis))
    worker = await wait_until(lambda: worker_of(redis, request))
    pid = await pid_of(redis, worker)
    for other in pids:
        os.kill(other, signal.SIGKILL if other == pid else signal.SIGCONT)
    answer = await task
    assert [token["logprob"] for token in answer["details"]["prefill"]] == close(
        [None, *(own for own, *_ in expected)]
    )
    attempt: bytes | None = await redis.hget(request, "attempt")  # type: ignore[misc]
    assert attempt in (None, b"2")
