"""Through HTTP, Redis and back: the ids are those of transformers' `generate`."""

import asyncio

import pytest

from benchmarks.client import stream
from tests.support.engine.reference import prompt_ids, reference_ids
from tests.support.fleet.fleet import Fleet
from tests.support.prompts import FEW, PROMPTS

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
