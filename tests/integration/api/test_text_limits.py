"""What cannot be served is refused before it costs anything, only a few long texts are tokenized at once, and
an error repeats only the beginning of a client's input.
"""

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.waiting import wait_until

LONG = "a " * 150_000
"""A text that is longer than the scripted worker's limit (1023 tokens), whatever its tokens are."""


async def test_a_long_text_that_is_truncated_is_served(broker: Broker) -> None:
    async with answering(broker.url, Answer([11])) as (worker, _, client):
        body = {"inputs": LONG, "parameters": {"truncate": 3, "max_new_tokens": 1}}
        assert (await client.post("/generate", json=body)).status_code == 200
    assert len(worker.seen[0].prompt_ids) == 3 * 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"inputs": LONG}),
        ("/chat_tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        ("/detokenize", {"tokens": [11] * 100_000}),
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


MANY_X = "x" * 300_000
HUGE = 10**4000
MESSAGES = [{"role": "user", "content": "a"}]
CHAT = {"messages": MESSAGES}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": FUNCTION | function}


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"model": MANY_X}),
    ("/v1/chat/completions", {"messages": [{"role": MANY_X, "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": MANY_X}]}]}),
    ("/v1/chat/completions", CHAT | {"tools": [tool(name=MANY_X)]}),
    ("/v1/chat/completions", CHAT | {"tools": [tool(parameters={"type": MANY_X})]}),
    ("/v1/chat/completions", CHAT | {"tools": [tool()], "tool_choice": MANY_X}),
    ("/v1/chat/completions", CHAT | {"service_tier": MANY_X}),
    ("/v1/chat/completions", CHAT | {"logit_bias": {MANY_X: 1}}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": MANY_X}}),
    ("/v1/chat/completions", CHAT | {"max_tokens": HUGE, "seed": HUGE}),
    ("/v1/completions", {"prompt": [HUGE]}),
    ("/v1/responses", {"input": [{"type": MANY_X}]}),
    ("/v1/responses", {"input": "a", "previous_response_id": MANY_X}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": MANY_X}}}),
    ("/generate", {"inputs": "a", "parameters": {"truncate": HUGE}}),
    ("/generate", {"inputs": "a", "parameters": {"logit_bias": {MANY_X: 1}}}),
    ("/vertex", {"instances": [CHAT | {"model": MANY_X}]}),
    ("/detokenize", {"tokens": [HUGE]}),
]
HEADS: list[tuple[str, str, dict[str, str]]] = [
    ("GET", f"/{LONG[:9000]}", {}),
    ("GET", f"/v1/models/{LONG[:9000]}", {}),
    ("GET", f"/requests/{LONG[:9000]}/stream", {}),
    ("X" * 900, "/generate", {}),
    ("POST", "/generate", {"content-encoding": MANY_X[:9000]}),
    ("POST", "/generate", {"x-tenant": MANY_X[:9000]}),
]


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[httpx.AsyncClient]:
    async with answering(broker.url, Answer([11])) as (_, _, client):
        yield client


def check_short(refused: httpx.Response) -> None:
    assert 400 <= refused.status_code < 500, refused.text[:1000]
    assert len(refused.text) < 1500, refused.text[:1500]
    assert max(map(len, re.findall("x+|[0-9]+", refused.text)), default=0) <= 200


async def test_of_a_long_value_the_error_has_the_beginning(client: httpx.AsyncClient) -> None:
    for path, body in BODIES:
        check_short(await client.post(path, json=body))
    for method, path, headers in HEADS:
        check_short(await client.request(method, path, json={"inputs": "a"}, headers=headers))
