"""What cannot be served is refused before it costs anything; only a few long texts are tokenized at once."""

import asyncio
import threading
from typing import Any

import pytest

from api.prompts.tokenizer import ModelTokenizer
from api.protocols import clouds, openai_bodies
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.waiting import wait_until

LONG = "a " * 150_000
"""A text that is longer than the scripted worker's limit (1023 tokens), whatever its tokens are."""


def forbidden(*_: Any) -> Any:
    raise AssertionError("this is paid for in vain")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"inputs": LONG}, "inputs"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/vertex", {"instances": [{"inputs": LONG}]}, "inputs"),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    broker: Broker, path: str, body: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = ModelTokenizer.encode
    monkeypatch.setattr(
        ModelTokenizer,
        "encode",
        lambda self, text, *args: forbidden() if len(text) > 10_000 else encode(self, text, *args),
    )
    async with answering(broker.url, Answer([11])) as (_, _, client):
        refused = await client.post(path, json=body)
    assert refused.status_code in (400, 422)
    assert f"`{field}` must have at most 1023 tokens. Given: at least 370" in refused.text


async def test_a_long_text_that_is_truncated_is_served(broker: Broker) -> None:
    async with answering(broker.url, Answer([11])) as (worker, _, client):
        body = {"inputs": LONG, "parameters": {"truncate": 3, "max_new_tokens": 1}}
        assert (await client.post("/generate", json=body)).status_code == 200
    assert len(worker.seen[0].prompt_ids) == 3 * 4


@pytest.mark.parametrize(
    ("path", "body", "words", "place", "name"),
    [
        (
            "/v1/completions",
            {"prompt": ["a"] * 100_000},
            "`prompt` supports up to 1024 prompts. Given: 100000",
            openai_bodies,
            "from_completion",
        ),
        (
            "/vertex",
            {"instances": [{"inputs": "a"}] * 100_000},
            "`instances` must have 1 to 1024 items. Given: 100000",
            clouds,
            "read_instance",
        ),
    ],
)
async def test_too_many_prompts_are_refused_before_any_is_read(
    broker: Broker,
    path: str,
    body: dict[str, Any],
    words: str,
    place: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, name, forbidden)
    async with answering(broker.url, Answer([11])) as (_, _, client):
        refused = await client.post(path, json=body)
    assert refused.status_code in (400, 422) and words in refused.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"inputs": LONG}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        ("/chat_tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        ("/detokenize", {"tokens": [11] * 100_000}),
        ("/generate", {"inputs": LONG, "parameters": {"truncate": 3}}),
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 3}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": 3},
        ),
    ],
)
async def test_every_route_that_tokenizes_waits_for_room(
    broker: Broker, path: str, body: dict[str, Any]
) -> None:
    """Short texts meanwhile do not wait."""
    async with answering(broker.url, Answer([11])) as (_, gateway, client):
        budget, end = gateway.pool.tokenizer.budget, threading.Event()
        occupied = asyncio.create_task(budget.run(budget.long.max_bytes, end.wait))
        try:
            waiting = asyncio.create_task(client.post(path, json=body))
            await wait_until(lambda: budget.long.waiting)
            for _ in range(3):
                assert (await client.post("/tokenize", json={"inputs": "a " * 5000})).status_code == 200
            assert not waiting.done()
        finally:
            end.set()
        assert (await waiting).status_code == 200 and await occupied
        assert budget.long.num_bytes == 0
