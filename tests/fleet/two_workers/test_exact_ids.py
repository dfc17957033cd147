"""Through HTTP, Redis and back: ids and beams are those of transformers, and a seed gives one text."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from benchmarks.client import stream
from tests.support.engine.reference import (
    Found,
    prompt_ids,
    reference_beams,
    reference_ids,
)
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.http_calls import PROMPT, complete, done_job, generate, post
from tests.support.prompts import FEW, PROMPTS

NEW_TOKENS, NUM_SHOWN, WIDTH = 20, 12, 4


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
