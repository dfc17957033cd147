"""Through HTTP, Redis and back: the ids are those of transformers' `generate`."""

import asyncio
import os
import re
import signal

import httpx
import pytest

from benchmarks.client import Stream, stream
from tests.support.engine.reference import prompt_ids, reference_ids
from tests.support.fleet.fleet import Fleet
from tests.support.prompts import FEW, PROMPTS
from tests.support.waiting import wait_until

MAX_NEW_TOKENS = 40


@pytest.mark.parametrize(
    ("prompts", "num_tokens"),
    [
        pytest.param([PROMPTS[place] for place in FEW], 20, id="few"),
        pytest.param(PROMPTS, MAX_NEW_TOKENS, id="all", marks=pytest.mark.slow),
    ],
)
async def test_ids_equal_generate(fleet: Fleet, prompts: list[str], num_tokens: int) -> None:
    expected = [ids[:num_tokens] for ids in reference_ids(prompt_ids(prompts), MAX_NEW_TOKENS)]
    url = f"{fleet.base_url}/generate_stream"
    bodies = [
        {"inputs": prompt, "parameters": {"max_new_tokens": num_tokens, "details": True}}
        for prompt in prompts
    ]
    alone = [(await stream(url, body)).ids for body in bodies[1:2]]
    together = await asyncio.gather(*(stream(url, body) for body in bodies))
    assert alone == expected[1:2]
    assert [answer.ids for answer in together] == expected
    reasons = [answer.frames[-1]["details"]["finish_reason"] for answer in together]
    assert reasons == ["length" if len(ids) == num_tokens else "eos_token" for ids in expected]


SYSTEM = "You are a patient teacher who explains how machines of all kinds work, in short and simple words. "
QUESTIONS = ["How does a lever lift a stone?", "Why does a wheel turn?"]
NEXT = "\nNow say it in one sentence:"
NEW_TOKENS = 20


async def ask(http: httpx.AsyncClient, text: str) -> tuple[str, list[int]]:
    body = {"inputs": text, "parameters": {"max_new_tokens": NEW_TOKENS, "details": True}}
    answer = (await http.post("/generate", json=body)).json()
    return answer["generated_text"], [token["id"] for token in answer["details"]["tokens"]]


async def count_hits(http: httpx.AsyncClient) -> int:
    """Return how many tokens were found in the prefix cache since the fleet started."""
    found = re.search(r"^tokenfleet_prefix_cache_hits\S* (\d+)", (await http.get("/metrics")).text, re.M)
    return int(found[1]) if found else 0


@pytest.mark.slow
async def test_ids_are_those_of_generate_however_much_is_cached(
    fleet: Fleet, http: httpx.AsyncClient
) -> None:
    before = await count_hits(http)
    turns = [SYSTEM + question for question in QUESTIONS]
    firsts = await asyncio.gather(*(ask(http, turn) for turn in turns))
    nexts = [turn + text + NEXT for turn, (text, _) in zip(turns, firsts, strict=True)]
    seconds = [await ask(http, turn) for turn in nexts for _ in range(2)]
    expected = reference_ids(prompt_ids([*turns, *nexts]), NEW_TOKENS)
    assert [ids for _, ids in firsts] == expected[:2]
    assert [ids for _, ids in seconds] == [ids for ids in expected[2:] for _ in range(2)]

    async def has_hits() -> bool:
        return await count_hits(http) >= before + 50

    await wait_until(has_hits)
    usage = (await http.post("/v1/completions", json={"prompt": nexts[0], "max_tokens": 2})).json()["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    streams = [Stream() for _ in range(8)]
    url, body = f"{fleet.base_url}/generate_stream", {"max_new_tokens": NEW_TOKENS}
    tasks = [
        asyncio.create_task(stream(url, {"inputs": nexts[i % 2], "parameters": body}, one))
        for i, one in enumerate(streams)
    ]
    await wait_until(lambda: any(len(one.frames) > 3 for one in streams))
    os.kill(fleet.pid("w0"), signal.SIGKILL)
    await asyncio.gather(*tasks)
    assert [one.ids for one in streams] == expected[2:] * 4
