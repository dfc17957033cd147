"""Sampling through the whole fleet: a seed says the ids, whoever computes them beside what, and every
parameter shows in the answer.
"""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from benchmarks.client import Stream, events, stream
from common.broker.client import connect
from common.broker.keys import Keys
from tests.support.engine.reference import prompt_ids, reference_ids, reference_logprobs
from tests.support.fleet.fleet import Fleet
from tests.support.prompts import FEW, PROMPTS
from tests.support.waiting import wait_until

KEYS = Keys("default")
PROMPT = "Once upon a time there was"
SEEDED: dict[str, Any] = {
    "do_sample": True,
    "seed": 11,
    "temperature": 0.9,
    "max_new_tokens": 20,
    "ignore_eos": True,
    "details": True,
}
SHORT: dict[str, Any] = {"seed": 11, "temperature": 0.9, "top_k": 40, "top_p": 0.95}
CHAT = [{"role": "user", "content": "Tell me a story."}]
EOS = 2
MAX_BATCH = 16
ENDLESS = 2000


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(
        num_workers=2, dtype="float32", threads=1, kv_cache_bytes="256MiB", max_batch_size=MAX_BATCH
    ) as one:
        yield one


@pytest.fixture
async def http(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=fleet.base_url, timeout=60, limits=httpx.Limits(max_connections=None)
    ) as client:
        yield client


@pytest.fixture
async def broker(fleet: Fleet) -> AsyncIterator[Redis]:
    async with connect(fleet.redis_url) as client:
        yield client


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def generate(http: httpx.AsyncClient, inputs: str = PROMPT, **parameters: Any) -> Any:
    """The answer, with `ids` and `reason` beside it."""
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 12, "details": True, **parameters}}
    answer = await post(http, "/generate", body)
    details = answer["details"]
    return answer | {"ids": [token["id"] for token in details["tokens"]], "reason": details["finish_reason"]}


async def complete(http: httpx.AsyncClient, **fields: Any) -> list[str]:
    """Texts of the choices of a completion."""
    answer = await post(http, "/v1/completions", {"prompt": PROMPT, "max_tokens": 12, **fields})
    return [choice["text"] for choice in answer["choices"]]


# --- seeds --------------------------------------------------------------------------------------------------


def mixed(i: int, max_new_tokens: int = 24) -> dict[str, Any]:
    """Different ways to sample, and lengths of prompts."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 1.3},
        {"top_k": 5},
        {"top_p": 0.8, "repetition_penalty": 1.2},
        {"typical_p": 0.9},
        {"min_p": 0.1},
    ]
    parameters = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "seed": i, **ways[i % len(ways)]}
    return {"inputs": f"{PROMPT} " * (1 + i % 5), "parameters": parameters}


async def test_a_seed_says_the_ids_alone_in_full_batches_and_on_each_worker(
    fleet: Fleet, broker: Redis
) -> None:
    """The others are too long to end meanwhile; they are cancelled."""
    url = f"{fleet.base_url}/generate_stream"
    alone = await stream(url, {"inputs": PROMPT, "parameters": SEEDED})
    assert len(alone.ids) == SEEDED["max_new_tokens"]
    others = [asyncio.create_task(stream(url, mixed(i, ENDLESS))) for i in range(2 * MAX_BATCH - 2)]
    await wait_until(lambda: rows_fill(broker, MAX_BATCH - 1))
    both = [Stream(), Stream()]
    streaming = [
        asyncio.create_task(stream(url, {"inputs": PROMPT, "parameters": SEEDED}, one)) for one in both
    ]
    await wait_until(lambda: all(one.frames for one in both))
    assert await rows_fill(broker, MAX_BATCH)
    await asyncio.gather(*streaming)
    assert [one.ids for one in both] == [alone.ids] * 2
    assert not any(task.done() for task in others)
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    await wait_until(lambda: rows_fill(broker, 0))


async def rows_fill(redis: Redis, count: int) -> bool:
    """Whether each of the two workers has so many rows."""
    workers = [await worker_of(redis, key) async for key in redis.scan_iter(KEYS.request("*"))]
    placed = Counter(worker for worker in workers if worker)
    return sorted(placed.values()) == [count] * (2 if count else 0)


async def worker_of(redis: Redis, home: bytes) -> str:
    """The worker that runs a request, if one does."""
    worker: bytes | None = await redis.hget(home.decode(), "worker")  # type: ignore[misc]
    return (worker or b"").decode()


async def kill_worker_of(redis: Redis, home: bytes) -> None:
    os.kill(await pid_of(redis, await worker_of(redis, home)), signal.SIGKILL)


async def pid_of(redis: Redis, worker: str) -> int:
    return int(await redis.hget(KEYS.worker(worker), "pid") or 0)  # type: ignore[misc]


async def test_a_seed_says_the_ids_after_the_worker_died(
    fleet: Fleet, http: httpx.AsyncClient, broker: Redis
) -> None:
    undisturbed = (await generate(http, **SEEDED))["ids"]
    await wait_until(lambda: fleet.workers_ready() == 2)
    ids: list[int] = []
    async for frame in events(f"{fleet.base_url}/generate_stream", {"inputs": PROMPT, "parameters": SEEDED}):
        ids.append(frame["token"]["id"])
        if len(ids) == 6:
            [home] = [key async for key in broker.scan_iter(KEYS.request("*"))]
            await kill_worker_of(broker, home)
    assert ids == undisturbed
    lives = (await http.get(f"/fleet/requests/{home.decode().rpartition(':')[2]}")).json()["timelines"]
    assert "died" in [one["what"] for happenings in lives.values() for one in happenings]


async def test_a_seed_says_the_text_at_every_door(http: httpx.AsyncClient, broker: Redis) -> None:
    async def submitted(**job: Any) -> Any:
        entry = await broker.xadd(KEYS.submit, {"job": json.dumps(job)})
        return json.loads(await wait_until(lambda: broker.get(KEYS.result(entry.decode()))))

    async def streamed(path: str, body: dict[str, Any]) -> list[Any]:
        return [
            frame
            async for frame in events(
                f"{http.base_url}{path}".replace("//v1", "/v1"), body | {"stream": True}
            )
        ]

    tgi, openai = SHORT | {"max_new_tokens": 12}, SHORT | {"max_tokens": 12}
    prompt = (await post(http, "/chat_tokenize", {"messages": CHAT}))["templated_text"]
    completion, chat = {"prompt": PROMPT, **openai}, {"messages": CHAT, **openai}
    generated, [completed], chunks, job, [root] = await asyncio.gather(
        generate(http, **tgi),
        complete(http, **SHORT),
        streamed("/v1/completions", completion),
        submitted(inputs=PROMPT, parameters=tgi),
        post(http, "/", {"inputs": PROMPT, "parameters": tgi}),
    )
    text = generated["generated_text"]
    assert text == completed == job["generated_text"] == root["generated_text"].removeprefix(PROMPT)
    assert text == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    generated, said, chunks, job = await asyncio.gather(
        generate(http, prompt, **tgi),
        post(http, "/v1/chat/completions", chat),
        streamed("/v1/chat/completions", chat),
        submitted(messages=CHAT, parameters=openai),
    )
    assert (
        generated["generated_text"]
        == said["choices"][0]["message"]["content"]
        == job["choices"][0]["message"]["content"]
        != text
    )
    assert generated["generated_text"] == "".join(
        chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks
    )


async def test_other_seeds_and_choices_differ(http: httpx.AsyncClient) -> None:
    seeded = await asyncio.gather(*(generate(http, seed=seed, do_sample=True) for seed in range(4)))
    texts = [answer["generated_text"] for answer in seeded]
    assert len(set(texts)) == 4
    four, again = await asyncio.gather(*(complete(http, n=4, seed=3) for _ in range(2)))
    assert four == again and len(set(four)) == 4
    assert four[0] == texts[3]
    drawn, redrawn = await asyncio.gather(*(generate(http, do_sample=True) for _ in range(2)))
    assert drawn["details"]["seed"] != redrawn["details"]["seed"]
    assert (await generate(http, do_sample=True, seed=drawn["details"]["seed"]))["ids"] == drawn["ids"]


# --- parameters ---------------------------------------------------------------------------------------------


async def test_what_is_greedy_equals_transformers(http: httpx.AsyncClient) -> None:
    prompt = PROMPTS[FEW[0]]
    [wanted] = reference_ids(prompt_ids([prompt]), 40)
    ways: list[dict[str, Any]] = [
        {},
        {"do_sample": False},
        {"temperature": 0},
        {"do_sample": True, "temperature": 1e-6},
        {"top_k": 1, "seed": 1},
        {"top_p": 1e-6, "do_sample": True},
        {"min_p": 1.0, "temperature": 1.5},
    ]
    answers = await asyncio.gather(*(generate(http, prompt, max_new_tokens=40, **way) for way in ways))
    assert [answer["ids"] for answer in answers] == [wanted] * len(ways)
    assert await complete(http, temperature=0) == [(await generate(http))["generated_text"]]


async def test_what_changes_a_distribution_changes_the_text(http: httpx.AsyncClient) -> None:
    """With one seed, on TGI's and OpenAI's routes: what means the same gives the same text."""
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
    ways: list[dict[str, Any]] = [{}, *same, *penalties]
    by_tgi = await asyncio.gather(*(generate(http, **plain, **way) for way in ways))
    by_openai = await asyncio.gather(*(complete(http, seed=2, max_tokens=24, **way) for way in ways))
    texts, others = [answer["generated_text"] for answer in by_tgi], [text for [text] in by_openai]
    assert texts[:-1] == others[:-1]
    assert len({*texts, *others}) == len(ways) + 1, "each way changes it, and frequency penalties are two"


async def test_biases_and_bad_words(http: httpx.AsyncClient) -> None:
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


async def test_ends(http: httpx.AsyncClient) -> None:
    plain = await generate(http)
    ids, third = plain["ids"], plain["details"]["tokens"][2]["text"]
    eos: dict[str, Any] = {"logit_bias": {EOS: 100}}
    ways: list[dict[str, Any]] = [
        {"stop": [third]},
        {"stop": [third], "min_new_tokens": 8},
        {"stop_token_ids": [ids[4]]},
        {"stop_token_ids": [ids[4]], "min_new_tokens": 8},
        eos,
        {**eos, "min_new_tokens": 5},
        {**eos, "ignore_eos": True},
    ]
    stop, later_stop, stop_id, later_id, end, later_end, never = await asyncio.gather(
        *(generate(http, **way) for way in ways)
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


async def test_what_is_told(http: httpx.AsyncClient) -> None:
    plain = await generate(http)
    told = await generate(http, top_n_tokens=3, return_full_text=True)
    assert told["generated_text"] == PROMPT + plain["generated_text"]
    assert told["ids"] == [tops[0]["id"] for tops in told["details"]["top_tokens"]]
    assert all(
        len(tops) == 3 and tops[0]["logprob"] >= tops[1]["logprob"] >= tops[2]["logprob"]
        for tops in told["details"]["top_tokens"]
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


async def test_what_is_told_of_a_prompt(fleet: Fleet, http: httpx.AsyncClient, broker: Redis) -> None:
    """At every door, alone and beside others, it is what transformers gives; and it outlives the worker that
    found it out.
    """
    prompt = PROMPTS[FEW[-2]]
    [ids] = prompt_ids([prompt])
    [wanted] = reference_logprobs([ids])
    own, likeliest = [[None, *(line[i] for line in wanted)] for i in (0, 1)]
    asked = {"decoder_input_details": True, "ignore_eos": True}
    echo = {"echo": True, "logprobs": 1, "max_tokens": 0}
    others = [asyncio.create_task(post(http, "/generate", mixed(i))) for i in range(4)]
    plain, told, *completions = await asyncio.gather(
        generate(http, prompt),
        generate(http, prompt, **asked),
        *(post(http, "/v1/completions", echo | {"prompt": one}) for one in (prompt, ids)),
    )
    entry = await broker.xadd(
        KEYS.submit, {"job": json.dumps({"inputs": prompt, "parameters": asked | {"max_new_tokens": 2}})}
    )
    job = json.loads(await wait_until(lambda: broker.get(KEYS.result(entry.decode()))))
    await asyncio.gather(*others)
    for details in (told["details"], job["details"]):
        assert [token["id"] for token in details["prefill"]] == ids
        assert "".join(token["text"] for token in details["prefill"]) == prompt
        assert [token["logprob"] for token in details["prefill"]] == close(own)
    assert told["ids"] == plain["ids"] and plain["details"]["prefill"] == []
    for choice in (completion["choices"][0] for completion in completions):
        assert choice["text"] == prompt and choice["logprobs"]["token_logprobs"] == close(own)
        assert [top and max(top.values()) for top in choice["logprobs"]["top_logprobs"]] == close(likeliest)

    await wait_until(lambda: fleet.workers_ready() == 2)
    task = asyncio.create_task(generate(http, prompt, **asked, max_new_tokens=60))
    [home] = await wait_until(lambda: homes(broker))
    await wait_until(lambda: broker.hexists(home.decode(), "prompt"))
    await kill_worker_of(broker, home)
    answer = await task
    assert [token["logprob"] for token in answer["details"]["prefill"]] == close(own) and len(
        answer["ids"]
    ) == 60
    lives = (await http.get(f"/fleet/requests/{home.decode().rpartition(':')[2]}")).json()["timelines"]
    assert "died" in [one["what"] for happenings in lives.values() for one in happenings]


async def homes(redis: Redis) -> list[bytes]:
    found = [key async for key in redis.scan_iter(KEYS.request("*"))]
    return [key for key in found if await redis.hget(key.decode(), "gateway")]  # type: ignore[misc]


def close(values: list[float | None]) -> list[Any]:
    return [value if value is None else pytest.approx(value, rel=1e-3, abs=1e-3) for value in values]


async def test_a_prompt_whose_worker_dies_is_told_of_by_another(
    fleet: Fleet, http: httpx.AsyncClient, broker: Redis
) -> None:
    """Before there was a first token: all of it is found out again."""
    prompt = PROMPTS[FEW[-2]]
    [wanted] = reference_logprobs(prompt_ids([prompt]))
    await wait_until(lambda: fleet.workers_ready() == 2)
    pids = [fleet.pid("w0"), fleet.pid("w1")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    task = asyncio.create_task(generate(http, prompt, decoder_input_details=True))
    [home] = await wait_until(lambda: homes(broker))
    worker = await wait_until(lambda: worker_of(broker, home))
    pid = await pid_of(broker, worker)
    for other in pids:
        os.kill(other, signal.SIGKILL if other == pid else signal.SIGCONT)
    answer = await task
    assert [token["logprob"] for token in answer["details"]["prefill"]] == close(
        [None, *(own for own, *_ in wanted)]
    )
    attempt: bytes | None = await broker.hget(home.decode(), "attempt")  # type: ignore[misc]
    assert attempt in (None, b"2")


async def test_the_best_of_two(http: httpx.AsyncClient) -> None:
    best = await generate(http, best_of=2, do_sample=True)
    [other] = best["details"]["best_of_sequences"]
    assert other["generated_text"] != best["generated_text"]

    def mean(tokens: list[dict[str, Any]]) -> float:
        return float(sum(token["logprob"] for token in tokens) / len(tokens))

    assert mean(best["details"]["tokens"]) >= mean(other["tokens"])
