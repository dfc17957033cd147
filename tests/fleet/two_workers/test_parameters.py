"""Every sampling and stopping parameter shows in the answer of the whole fleet."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.support.engine.reference import prompt_ids, reference_ids
from tests.support.fleet.http_calls import PROMPT, complete, generate, post
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
        {"top_p": 1e-6, "do_sample": True},
        {"min_p": 1.0, "temperature": 1.5},
    ]
    answers = await asyncio.gather(
        *(generate(http, prompt, max_new_tokens=16, **variant) for variant in variants)
    )
    assert [answer["ids"] for answer in answers] == [expected] * len(variants)
    assert await complete(http, temperature=0) == [(await generate(http))["generated_text"]]


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


@pytest.mark.slow
async def test_logit_bias_and_bad_words_change_the_ids(http: httpx.AsyncClient) -> None:
    plain = await generate(http)
    first, word = plain["ids"][0], plain["details"]["tokens"][1]["text"].strip()
    assert (await generate(http, logit_bias={first: -100}))["ids"][0] != first
    assert (await generate(http, logit_bias={500: 100}))["ids"] == [500] * 12
    assert (await complete(http, temperature=0, logit_bias={"500": 100}))[0] == (
        await generate(http, logit_bias={500: 100})
    )["generated_text"]
    assert word in plain["generated_text"].split()
    assert word not in (await generate(http, bad_words=[word]))["generated_text"].split()
    assert word not in (await complete(http, temperature=0, bad_words=[word]))[0].split()


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
    ]
    stop, later_stop, stop_id, later_id, end, later_end, never = await asyncio.gather(
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


COMMON_IDS = [
    ids[0] for ids in prompt_ids([*",.", " the", " a", " and", " to", " of", " was", " in", " who"])
]
NUCLEUS: dict[str, Any] = {"do_sample": True, "seed": 5, "max_new_tokens": 32, "ignore_eos": True}
NUCLEUS |= {"temperature": 1.5, "top_p": 0.95}
DECAYING = NUCLEUS | {"top_p_decay": 0.5}


@pytest.mark.slow
async def test_decays_of_top_p_and_wide_seeds_change_their_own_sequence_alone(
    http: httpx.AsyncClient,
) -> None:
    own: list[dict[str, Any]] = [
        {"top_p_decay": 0.5},
        {"top_p_min": 0.9},
        {"top_p_reset_ids": COMMON_IDS},
        {"seed": 2**63 - 1},
    ]
    bodies = [NUCLEUS, DECAYING, *(DECAYING | one for one in own[1:3]), NUCLEUS | own[3]]
    answers = await asyncio.gather(*(generate(http, **body) for body in [*bodies, *bodies]))
    ids = [answer["ids"] for answer in answers]
    assert ids[: len(bodies)] == ids[len(bodies) :], "each gives the same ids again"
    assert len({str(one) for one in ids}) == len(bodies)


async def test_top_k_and_top_p_of_zero_are_greedy(http: httpx.AsyncClient) -> None:
    """Without `do_sample` on TGI's route, and with `temperature` 0 on OpenAI's."""
    greedy = await generate(http)
    assert (await generate(http, top_k=0))["ids"] == greedy["ids"]
    assert await complete(http, temperature=0, top_k=0) == [greedy["generated_text"]]


async def test_a_request_that_comes_later_joins_a_batch_that_runs(http: httpx.AsyncClient) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 60, "ignore_eos": True, "details": True}}
    async with http.stream("POST", "/generate_stream", json=body) as answer:
        lines = (line async for line in answer.aiter_lines() if line.startswith("data:"))
        first = await anext(lines)
        short = await generate(http, ignore_eos=True)
        events = [json.loads(line.removeprefix("data:")) for line in [first, *[line async for line in lines]]]
    assert [event["token"]["id"] for event in events][:12] == short["ids"] and len(events) == 60
