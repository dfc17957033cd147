"""Through HTTP, Redis and back: ids, beams, log-probabilities and logits are those of transformers."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from redis.asyncio import Redis

from benchmarks.client import stream
from tests.support.engine.reference import (
    Found,
    prompt_ids,
    reference_beams,
    reference_ids,
    reference_logits,
    reference_logprobs,
)
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.http_calls import PROMPT, complete, done_job, generate, post, sampled_body
from tests.support.prompts import FEW, PROMPTS

NEW_TOKENS, NUM_SHOWN, WIDTH = 20, 12, 4
LONG_PROMPT = PROMPTS[FEW[-2]]


async def test_ids_equal_generate(fleet: Fleet) -> None:
    prompts = [PROMPTS[place] for place in FEW]
    expected = [ids[:NEW_TOKENS] for ids in reference_ids(prompt_ids(prompts), 40)]
    url = f"{fleet.base_url}/generate_stream"
    bodies = [
        {"inputs": prompt, "parameters": {"max_new_tokens": NEW_TOKENS, "details": True}}
        for prompt in prompts
    ]
    alone = [(await stream(url, body)).ids for body in bodies[1:2]]
    together = await asyncio.gather(*(stream(url, body) for body in bodies))
    assert alone == expected[1:2]
    assert [answer.ids for answer in together] == expected
    reasons = [answer.frames[-1]["details"]["finish_reason"] for answer in together]
    assert reasons == ["length" if len(ids) == NEW_TOKENS else "eos_token" for ids in expected]


def beams_of(ids: Sequence[int]) -> list[Any]:
    """The sequences of transformers, equal to those whose scores differ in their last digits."""
    found = reference_beams([ids], NUM_SHOWN, num_beams=WIDTH)[0]
    return [(sequence, pytest.approx(score, abs=1e-3)) for sequence, score in found]


def of_choices(choices: list[dict[str, Any]]) -> list[Found]:
    return [(choice["token_ids"], choice["beam_score"]) for choice in choices]


def of_details(details: dict[str, Any]) -> list[Found]:
    sequences = [details, *details["best_of_sequences"]]
    return [([token["id"] for token in one["tokens"]], one["beam_score"]) for one in sequences]


async def test_beams_and_their_scores_equal_transformers_on_every_route(
    http: httpx.AsyncClient, redis: Redis
) -> None:
    found = beams_of(prompt_ids([PROMPT])[0])
    asked = {"beam_width": WIDTH, "max_tokens": NUM_SHOWN, "return_token_ids": True}
    assert of_choices((await post(http, "/v1/completions", {"prompt": PROMPT} | asked))["choices"]) == found
    messages = {"messages": [{"role": "user", "content": "Say hi."}]}
    chat = await post(http, "/v1/chat/completions", messages | asked)
    assert of_choices(chat["choices"]) == beams_of(chat["prompt_token_ids"])
    parameters = {"beam_width": WIDTH, "max_new_tokens": NUM_SHOWN, "details": True}
    generated = {"inputs": PROMPT, "parameters": parameters}
    assert of_details((await post(http, "/generate", generated))["details"]) == found
    assert of_details((await done_job(redis, **generated))["details"]) == found


def close(values: list[float | None]) -> list[Any]:
    return [value if value is None else pytest.approx(value, rel=1e-3, abs=1e-3) for value in values]


@pytest.mark.slow
async def test_prompt_logprobs_equal_transformers(http: httpx.AsyncClient, redis: Redis) -> None:
    """On every route, in a batch with others."""
    [ids] = prompt_ids([LONG_PROMPT])
    [expected] = reference_logprobs([ids])
    own, likeliest = [[None, *(line[i] for line in expected)] for i in (0, 1)]
    details = {"decoder_input_details": True, "ignore_eos": True, "max_new_tokens": 2, "details": True}
    echo = {"echo": True, "logprobs": 1, "max_tokens": 0}
    others = [asyncio.create_task(post(http, "/generate", sampled_body(i))) for i in range(4)]
    echoed, job, *completions = await asyncio.gather(
        generate(http, LONG_PROMPT, **details),
        done_job(redis, inputs=LONG_PROMPT, parameters=details),
        *(post(http, "/v1/completions", echo | {"prompt": one}) for one in (LONG_PROMPT, ids)),
    )
    await asyncio.gather(*others)
    for found in (echoed["details"], job["details"]):
        assert [token["id"] for token in found["prefill"]] == ids
        assert "".join(token["text"] for token in found["prefill"]) == LONG_PROMPT
        assert [token["logprob"] for token in found["prefill"]] == close(own)
    for choice in (completion["choices"][0] for completion in completions):
        assert choice["text"] == LONG_PROMPT and choice["logprobs"]["token_logprobs"] == close(own)
        assert [top and max(top.values()) for top in choice["logprobs"]["top_logprobs"]] == close(likeliest)


def check_logits(found: dict[str, Any], ids: list[int], first: int, last: int) -> None:
    """The logits in a field of a response are those of these positions."""
    assert found["dtype"] == "float32"
    values = np.frombuffer(base64.b64decode(found["data"]), "<f4").reshape(found["shape"])
    np.testing.assert_allclose(values, reference_logits(ids)[first:last], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
async def test_logits_equal_transformers_on_every_route(http: httpx.AsyncClient, redis: Redis) -> None:
    """In a batch with others, and with penalties, which raw logits do not show."""
    [ids] = prompt_ids([LONG_PROMPT])
    others = [asyncio.create_task(post(http, "/generate", sampled_body(i))) for i in range(3)]
    asked = {"return_context_logits": True, "return_generation_logits": True, "return_token_ids": True}
    penalised = {"temperature": 0.9, "seed": 3, "frequency_penalty": 1.5, "repetition_penalty": 1.3}
    body = {"prompt": [ids, ids[:5]], "max_tokens": 4, "n": 2} | asked | penalised
    for i, choice in enumerate((await post(http, "/v1/completions", body))["choices"]):
        known = (ids, ids, ids[:5], ids[:5])[i]
        assert ("context_logits" in choice) == (i % 2 == 0)
        if i % 2 == 0:
            check_logits(choice["context_logits"], known, 0, len(known))
        check_logits(choice["generation_logits"], known + choice["token_ids"], len(known) - 1, -1)
    parameters = {"max_new_tokens": 3, "details": True, "return_generation_logits": True}
    generated = {"inputs": LONG_PROMPT, "parameters": parameters}
    for answer in (await post(http, "/generate", generated), await done_job(redis, **generated)):
        new_ids = [token["id"] for token in answer["details"]["tokens"]]
        check_logits(answer["generation_logits"], ids + new_ids, len(ids) - 1, -1)
    await asyncio.gather(*others)


SHORT: dict[str, Any] = {"seed": 11, "temperature": 0.9, "top_k": 40, "top_p": 0.95}
CHAT = [{"role": "user", "content": "Tell me a story."}]


async def test_a_seed_gives_the_same_text_on_every_route(
    fleet: Fleet, http: httpx.AsyncClient, redis: Redis
) -> None:
    async def streamed(path: str, body: dict[str, Any]) -> list[Any]:
        return (await stream(fleet.base_url + path, body | {"stream": True})).frames

    tgi, openai = SHORT | {"max_new_tokens": 12}, SHORT | {"max_tokens": 12}
    prompt = (await post(http, "/chat_tokenize", {"messages": CHAT}))["templated_text"]
    completion, chat = {"prompt": PROMPT, **openai}, {"messages": CHAT, **openai}
    generated, [completed], chunks, job, [root] = await asyncio.gather(
        generate(http, **tgi),
        complete(http, **SHORT),
        streamed("/v1/completions", completion),
        done_job(redis, inputs=PROMPT, parameters=tgi),
        post(http, "/", {"inputs": PROMPT, "parameters": tgi}),
    )
    text = generated["generated_text"]
    assert text == completed == job["generated_text"] == root["generated_text"].removeprefix(PROMPT)
    assert text == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    generated, chatted, chunks, job = await asyncio.gather(
        generate(http, prompt, **tgi),
        post(http, "/v1/chat/completions", chat),
        streamed("/v1/chat/completions", chat),
        done_job(redis, messages=CHAT, parameters=openai),
    )
    assert (
        generated["generated_text"]
        == chatted["choices"][0]["message"]["content"]
        == job["choices"][0]["message"]["content"]
        != text
    )
    assert generated["generated_text"] == "".join(
        chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks
    )
