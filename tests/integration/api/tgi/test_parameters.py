"""Parameters that TGI's routes accept: what reaches the worker."""

from typing import Any

import httpx

from common.messages.request import SamplingParams, StoppingParams
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids


async def generate(
    client: httpx.AsyncClient, parameters: dict[str, Any], inputs: str = "a"
) -> httpx.Response:
    return await client.post("/generate", json={"inputs": inputs, "parameters": parameters})


NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "temperature": 1,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0,
    "typical_p": 1.0,
    "do_sample": False,
    "logit_bias": {},
    "bad_words": [],
    "min_new_tokens": 0,
    "stop_token_ids": [],
    "return_full_text": False,
    "watermark": False,
    "decoder_input_details": False,
    "top_n_tokens": 0,
}


async def test_neutral_values_and_null_are_accepted(broker: Broker) -> None:
    one = Answer(ids("a"))
    async with answering(broker.url, one) as (worker, _, client):
        absent = dict.fromkeys(
            [*NEUTRAL, "seed", "grammar", "adapter_id", "stop", "truncate", "max_new_tokens"]
        )
        for parameters in (NEUTRAL, absent, {"temperature": 0, "top_k": -1}):
            response = await generate(client, parameters)
            assert (response.status_code, response.text) == (200, '{"generated_text":"a"}')
    assert [request.sampling for request in worker.seen] == [None] * 3


async def test_odd_but_valid_inputs_are_served(broker: Broker) -> None:
    one = Answer(ids("a"))
    async with answering(broker.url, one) as (worker, _, client):
        for inputs in ("a\x00b", "\ufffd", "\u2028", "  ", "👩‍👩‍👧‍👦"):
            assert (await generate(client, {"stop": [inputs]}, inputs)).status_code == 200
        assert worker.seen[0].stopping.stop == ["a\x00b"]


async def test_long_prompts_can_be_truncated(broker: Broker) -> None:
    one = Answer(ids("a"))
    async with answering(broker.url, one) as (worker, _, client):
        assert (await generate(client, {"truncate": 1000}, "word " * 3000)).status_code == 200
        assert (len(worker.seen[0].prompt_ids) // 4, worker.seen[0].stopping.max_new_tokens) == (1000, 24)


async def test_every_parameter_reaches_the_worker(broker: Broker) -> None:
    parameters = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "top_p_decay": 0.75,
        "top_p_min": 0.25,
        "top_p_reset_ids": [6, 9],
        "min_p": 0.1,
        "typical_p": 0.8,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "seed": 2**63 - 1,
        "logit_bias": {"5": -100, "7": 1.5},
        "bad_words": ["dog"],
        "min_new_tokens": 2,
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "top_n_tokens": 5,
        "max_new_tokens": 3,
    }
    answer = Answer(ids("a b c"))
    async with answering(broker.url, answer) as (worker, _, client):
        response = await generate(client, parameters | {"top_n_tokens": 0})
        assert response.status_code == 200, response.text
    [request] = worker.seen
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        top_p_decay=0.75,
        top_p_min=0.25,
        top_p_reset_ids=[6, 9],
        min_p=0.1,
        typical_p=0.8,
        repetition_penalty=1.5,
        relative_frequency_penalty=0.5,
        presence_penalty=0.25,
        seed=2**63 - 1,
        logit_bias=[(5, -100.0), (7, 1.5)],
        bad_words=[ids(text) for text in ("dog", " dog")],
    )
    assert request.stopping == StoppingParams(3, 2, stop_ids=[3, 4], ignore_eos=True)


async def test_requests_share_blocks_with_those_of_their_salt_only(broker: Broker) -> None:
    one = Answer(ids("a"))
    async with answering(broker.url, one) as (worker, _, client):
        prompt = "a " * 20
        for salt in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}):
            assert (await generate(client, salt, prompt)).status_code == 200
        refused = await generate(client, {"cache_salt": ""}, prompt)
    assert [request.cache_salt for request in worker.seen] == ["", "x", "y"]
    assert len({request.block_hashes for request in worker.seen}) == 3
    assert refused.status_code == 422 and "`cache_salt`" in refused.json()["error"]
