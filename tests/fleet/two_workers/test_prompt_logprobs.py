"""Log-probabilities of a prompt are those of transformers."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from common.broker.keys import Keys
from tests.support.engine.reference import prompt_ids, reference_logprobs
from tests.support.fleet.http_calls import generate, post, sampled_body
from tests.support.prompts import FEW, PROMPTS
from tests.support.waiting import wait_until

KEYS = Keys("default")


@pytest.mark.slow
async def test_prompt_logprobs_equal_transformers(http: httpx.AsyncClient, redis: Redis) -> None:
    """On every route, alone and in a batch."""
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


def close(values: list[float | None]) -> list[Any]:
    return [value if value is None else pytest.approx(value, rel=1e-3, abs=1e-3) for value in values]
