"""Every sampling and stopping parameter shows in the answer of the whole fleet."""

import asyncio
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from benchmarks.client import stream
from tests.support.engine.reference import prompt_ids, reference_ids
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.http_calls import PROMPT, complete, done_job, generate, post
from tests.support.prompts import FEW, PROMPTS

EOS = 2


async def test_greedy_ids_equal_transformers(http: httpx.AsyncClient) -> None:
    prompt = PROMPTS[FEW[0]]
    expected = reference_ids(prompt_ids([prompt]), 40)[0][:16]
    variants: list[dict[str, Any]] = [
        {},
        {"do_sample": False},
        {"temperature": 0},
        {"do_sample": True, "temperature": 1e-6},
        {"top_k": 1, "seed": 1},
        {"top_k": 0},
        {"top_p": 1e-6, "do_sample": True},
        {"min_p": 1.0, "temperature": 1.5},
    ]
    answers = await asyncio.gather(
        *(generate(http, prompt, max_new_tokens=16, **variant) for variant in variants)
    )
    assert [answer["ids"] for answer in answers] == [expected] * len(variants)
    assert await complete(http, temperature=0, top_k=0) == [(await generate(http))["generated_text"]]


@pytest.mark.slow
async def test_parameters_of_the_distribution_change_the_text(http: httpx.AsyncClient) -> None:
    """With one seed, parameters that mean the same give the same text on TGI's and OpenAI's routes."""
    plain: dict[str, Any] = {"seed": 2, "do_sample": True, "max_new_tokens": 24}
    same: list[dict[str, Any]] = [
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.3},
        {"min_p": 0.3},
        {"typical_p": 0.2},
        {"repetition_penalty": 3.0},
    ]
    penalties: list[dict[str, Any]] = [{"presence_penalty": 2.0}, {"frequency_penalty": 1.0}]
    variants: list[dict[str, Any]] = [{}, *same, *penalties]
    by_tgi = await asyncio.gather(*(generate(http, **plain, **variant) for variant in variants))
    by_openai = await asyncio.gather(
        *(complete(http, seed=2, max_tokens=24, **variant) for variant in variants)
    )
    texts, others = [answer["generated_text"] for answer in by_tgi], [text for [text] in by_openai]
    assert texts[:-1] == others[:-1]
    assert len({*texts, *others}) == len(variants) + 1, (
        "each parameter changes it, and frequency penalties are two"
    )


async def test_each_stop_condition_ends_where_it_should(http: httpx.AsyncClient) -> None:
    plain = await generate(http)
    ids, third = plain["ids"], plain["details"]["tokens"][2]["text"]
    eos: dict[str, Any] = {"logit_bias": {EOS: 100}}
    variants: list[dict[str, Any]] = [
        {"stop": [third]},
        {"stop": [third], "min_new_tokens": 8},
        {"stop_token_ids": [ids[4]]},
        {"stop_token_ids": [ids[4]], "min_new_tokens": 8},
        eos,
        {**eos, "min_new_tokens": 5},
        {**eos, "ignore_eos": True},
        {"bad_words": [third.strip()]},
    ]
    stop, later_stop, stop_id, later_id, end, later_end, never, other = await asyncio.gather(
        *(generate(http, **variant) for variant in variants)
    )
    assert (stop["ids"], stop["reason"]) == (ids[:3], "stop_sequence")
    assert stop["generated_text"].endswith(third)
    assert await complete(http, temperature=0, stop=third) == [stop["generated_text"].removesuffix(third)]
    assert (stop_id["ids"], stop_id["reason"]) == (ids[:5], "stop_sequence")
    assert len(later_stop["ids"]) > 8 and len(later_id["ids"]) >= 8
    assert (end["ids"], end["reason"]) == ([EOS], "eos_token")
    assert EOS not in later_end["ids"][:5] and (later_end["ids"][5:], later_end["reason"]) == (
        [EOS],
        "eos_token",
    )
    assert (never["ids"], never["reason"]) == ([EOS] * 12, "length")
    assert third.strip() not in other["generated_text"].split()


async def test_details_have_the_likeliest_tokens(http: httpx.AsyncClient) -> None:
    plain = await generate(http)
    detailed = await generate(http, top_n_tokens=3, return_full_text=True)
    assert detailed["generated_text"] == PROMPT + plain["generated_text"]
    assert detailed["ids"] == [tops[0]["id"] for tops in detailed["details"]["top_tokens"]]
    assert all(
        len(tops) == 3 and tops[0]["logprob"] >= tops[1]["logprob"] >= tops[2]["logprob"]
        for tops in detailed["details"]["top_tokens"]
    )
    assert set(await post(http, "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}})) == {
        "generated_text"
    }
    answer = await post(
        http, "/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "logprobs": 2}
    )
    assert [len(tops) for tops in answer["choices"][0]["logprobs"]["top_logprobs"]] == [2] * 3
    cut = await generate(http, truncate=3)
    assert cut["ids"] == (await generate(http, " time there was"))["ids"] != plain["ids"]


async def test_best_of_two_has_the_likelier_first(http: httpx.AsyncClient) -> None:
    best = await generate(http, best_of=2, do_sample=True)
    [other] = best["details"]["best_of_sequences"]
    assert other["generated_text"] != best["generated_text"]

    def mean(tokens: list[dict[str, Any]]) -> float:
        return float(sum(token["logprob"] for token in tokens) / len(tokens))

    assert mean(best["details"]["tokens"]) >= mean(other["tokens"])


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
