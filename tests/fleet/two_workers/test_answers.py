"""Through HTTP, Redis and back: ids and beams are those of transformers, and a seed gives one text.
The Responses API through OpenAI's own package, with the real model, also while processes are killed.
Jobs of other services and of arq clients on a whole fleet: the examples of docs/ are true.
"""

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from redis.asyncio import Redis

from benchmarks.client import stream
from tests.support import brokers
from tests.support.answers import event_type, post
from tests.support.engine.reference import Found, prompt_ids, reference_beams, reference_ids
from tests.support.fleet.fleet import Fleet
from tests.support.jobs import Service
from tests.support.load import PROMPT, complete, generate
from tests.support.prompts import FEW, PROMPTS
from tests.support.waiting import wait_until, wait_until_sync

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
    assert of_details((await Service(redis).answer(**generated))["details"]) == found


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
        Service(redis).answer(inputs=PROMPT, parameters=tgi),
        post(http, "/", {"inputs": PROMPT, "parameters": tgi}),
    )
    text = generated["generated_text"]
    assert text == completed == job["generated_text"] == root["generated_text"].removeprefix(PROMPT)
    assert text == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    generated, chatted, chunks, job = await asyncio.gather(
        generate(http, prompt, **tgi),
        post(http, "/v1/chat/completions", chat),
        streamed("/v1/chat/completions", chat),
        Service(redis).answer(messages=CHAT, parameters=openai),
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


# --- responses ----------------------------------------------------------------------------------------------

ASKED: dict[str, Any] = {"model": "smollm2", "input": "Name three colours.", "temperature": 0}
BRIEF = ASKED | {"max_output_tokens": 12}
LONG = ASKED | {"max_output_tokens": 80, "extra_body": {"ignore_eos": True}}


class Colour(pydantic.BaseModel):
    name: str
    red: int


async def test_create_stream_parse_and_conversations(client: AsyncOpenAI) -> None:
    whole = await client.responses.create(**BRIEF, instructions="Be brief.", metadata={"a": "b"})
    assert whole.output_text and whole.status == "incomplete" and whole.metadata == {"a": "b"}
    events = [
        event async for event in await client.responses.create(**BRIEF, instructions="Be brief.", stream=True)
    ]
    for event in events:
        event_type().validate_python(event.to_dict())
    async with client.responses.stream(**BRIEF, instructions="Be brief.") as stream:
        kinds = [event.type async for event in stream]
    assert kinds == [event.type for event in events] and kinds[-1] == "response.incomplete"
    texts = [event.text for event in events if event.type == "response.output_text.done"]
    assert texts == [whole.output_text]
    parsed = await client.responses.parse(
        model="smollm2", input="A colour, please.", temperature=0, max_output_tokens=200, text_format=Colour
    )
    assert isinstance(parsed.output_parsed, Colour) or parsed.status == "incomplete"
    second = await client.responses.create(**BRIEF, previous_response_id=whole.id)
    items = [item async for item in client.responses.input_items.list(second.id, order="asc")]
    assert [item.type for item in items] == ["message"] * 3
    assert await client.responses.retrieve(second.id) == second
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**BRIEF, previous_response_id=second.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


async def has_ended(client: AsyncOpenAI, response_id: str) -> Response:
    """Return the response once it has ended, even if its gateways die meanwhile."""
    found: list[Response] = []

    async def ended() -> bool:
        with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
            found.append(await client.responses.retrieve(response_id))
        return bool(found) and found[-1].status not in ("queued", "in_progress")

    await wait_until(ended)
    return found[-1]


async def follow(client: AsyncOpenAI, response_id: str, events: list[Any]) -> None:
    """Add the following events, and connect again whenever the connection is lost."""

    async def followed() -> bool:
        with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError, openai.APIError):
            after = events[-1].sequence_number
            stream = await client.responses.retrieve(response_id, stream=True, starting_after=after)
            async for event in stream:
                events.append(event)  # noqa: PERF401  # those before a lost connection count
        return bool(events[-1].type in ("response.completed", "response.incomplete", "response.failed"))

    await wait_until(followed)


def num_tokens(response: Any) -> tuple[int, int]:
    """Usage without cached tokens, whose number depends on the worker."""
    return response.usage.input_tokens, response.usage.output_tokens


@pytest.mark.slow
async def test_a_background_response_outlives_every_process(client: AsyncOpenAI, fleet: Fleet) -> None:
    """Followed event by event or read at its end, it equals that of an undisturbed fleet."""
    undisturbed = await client.responses.create(**LONG)
    silent = await client.responses.create(**LONG, background=True)
    stream = await client.responses.create(**LONG, background=True, stream=True)
    events: list[Any] = []
    async for event in stream:
        events.append(event)
        if len(events) > 8:
            break
    await stream.close()
    pids = await asyncio.to_thread(fleet.pids)
    for name in ("g0", "g1", "w0", "w1", "b0"):
        os.kill(pids[name], signal.SIGKILL)
    response_id = events[0].response.id
    await follow(client, response_id, events)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == undisturbed.output_text == events[-1].response.output_text
    for one in (response_id, silent.id):
        found = await has_ended(client, one)
        assert (found.output_text, found.status) == (undisturbed.output_text, "incomplete")
        assert num_tokens(found) == num_tokens(undisturbed)


# --- jobs ---------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]


def console_blocks(page: str, heading: str) -> list[str]:
    section = (ROOT / "docs" / page).read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```console\n(.*?)```", section, re.DOTALL)


def looks_like(expected: str, printed: str) -> bool:
    """Compare two texts: `…` stands for anything, and ids of entries in `submit` may differ."""
    pattern = re.escape(expected.strip()).replace("…", ".*").replace("1760000000000\\-", r"\d+\-")
    return re.fullmatch(re.sub(r"(\\d\+\\-)\d", r"\1\\d+", pattern), printed.strip(), re.DOTALL) is not None


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli on this machine")
def test_the_redis_cli_session_of_the_docs_is_true(fleet: Fleet) -> None:
    cli = ["redis-cli", "--no-raw", "-u", brokers.open_port(fleet.redis_url)]

    def answer(command: str) -> str | None:
        words = [*cli, *shlex.split(command)]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return None if "(nil)" in text else text

    steps = [
        step for block in console_blocks("jobs.md", "A job over Redis") for step in block.split("> ")[1:]
    ]
    assert len(steps) >= 4
    for step in steps:
        command, _, expected = step.partition("\n")
        output = wait_until_sync(partial(answer, command))
        assert looks_like(expected, output), f"{command}\n{output}"


def test_batches_need_no_setting(fleet: Fleet, tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": asked}
    (tmp_path / "asked.jsonl").write_text(json.dumps(line))
    names = [str(tmp_path / name) for name in ("asked.jsonl", "answers.jsonl")]
    words = ["batch", names[0], "-o", names[1], "--url", fleet.base_url]
    command = [sys.executable, "-m", "deploy.cli", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "answers.jsonl").read_text())["custom_id"] == "a"


def test_the_first_arq_example_of_the_docs_is_true(fleet: Fleet, tmp_path: Path) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "jobs.md").read_text(), re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(code.replace("redis://127.0.0.1:6379/0", fleet.redis_url))
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    generated, chatted = done.stdout.splitlines()[:2]
    assert generated == "{'generated_text': ' Paris.'}"
    assert chatted
