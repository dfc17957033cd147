"""What cannot be served is refused before it costs anything; only a few long texts are tokenized at once.

An error repeats only the beginning of a client's input.
"""

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from api.errors import ApiError, cut, invalid, quoted
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


QUOTED_LONG = "x" * 300_000
HUGE = 10**4000
MESSAGES = [{"role": "user", "content": "a"}]
CHAT = {"messages": MESSAGES}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": FUNCTION | function}


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"model": QUOTED_LONG}),
    ("/v1/chat/completions", {"messages": [{"role": QUOTED_LONG, "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": QUOTED_LONG}]}]}),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": QUOTED_LONG, "function": FUNCTION}]}),
    ("/v1/chat/completions", CHAT | {"tools": [tool(name=QUOTED_LONG)]}),
    ("/v1/chat/completions", CHAT | {"tools": [tool(parameters={"type": QUOTED_LONG})]}),
    (
        "/v1/chat/completions",
        CHAT | {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": QUOTED_LONG}}},
    ),
    ("/v1/chat/completions", CHAT | {"tools": [tool()], "tool_choice": QUOTED_LONG}),
    ("/v1/chat/completions", CHAT | {"reasoning_effort": QUOTED_LONG}),
    ("/v1/chat/completions", CHAT | {"service_tier": QUOTED_LONG}),
    ("/v1/chat/completions", CHAT | {"priority": QUOTED_LONG}),
    ("/v1/chat/completions", CHAT | {"logit_bias": {QUOTED_LONG: 1}}),
    ("/v1/chat/completions", CHAT | {"logit_bias": {QUOTED_LONG: "a"}}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": QUOTED_LONG}}),
    (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "structural_tag", "format": {"type": QUOTED_LONG}}},
    ),
    ("/v1/chat/completions", CHAT | {"temperature": HUGE}),
    ("/v1/chat/completions", CHAT | {"max_tokens": HUGE, "seed": HUGE}),
    ("/v1/completions", {"prompt": "a", "n": HUGE}),
    ("/v1/completions", {"prompt": [HUGE]}),
    ("/v1/completions", {"prompt": "a", "best_of": HUGE}),
    ("/v1/responses", {"input": "a", "model": QUOTED_LONG}),
    ("/v1/responses", {"input": [{"type": QUOTED_LONG}]}),
    ("/v1/responses", {"input": [{"role": QUOTED_LONG, "content": "a"}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": QUOTED_LONG}]}]}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": QUOTED_LONG}]}),
    ("/v1/responses", {"input": "a", "previous_response_id": QUOTED_LONG}),
    ("/v1/responses", {"input": "a", "tools": [{"type": QUOTED_LONG}]}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": QUOTED_LONG}}}),
    ("/v1/responses", {"input": "a", "truncation": QUOTED_LONG}),
    ("/generate", {"inputs": "a", "parameters": {"best_of": HUGE}}),
    ("/generate", {"inputs": "a", "parameters": {"truncate": HUGE}}),
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": HUGE}}),
    ("/generate", {"inputs": "a", "parameters": {"logit_bias": {QUOTED_LONG: 1}}}),
    ("/vertex", {"instances": [CHAT | {"model": QUOTED_LONG}]}),
    ("/tokenize", {"prompt": "a", "model": QUOTED_LONG}),
    ("/detokenize", {"tokens": [HUGE]}),
]


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[httpx.AsyncClient]:
    async with answering(broker.url, Answer([11])) as (_, _, client):
        yield client


def check_short(refused: httpx.Response) -> None:
    assert 400 <= refused.status_code < 500, refused.text[:1000]
    assert len(refused.text) < 1500, refused.text[:1500]
    assert max(map(len, re.findall("x+|[0-9]+", refused.text)), default=0) <= 200


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[f"{path} {i}" for i, (path, _) in enumerate(BODIES)])
async def test_of_a_long_value_the_error_has_the_beginning(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    check_short(await client.post(path, json=body))


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", f"/{LONG[:9000]}", {}),
        ("GET", f"/v1/models/{LONG[:9000]}", {}),
        ("GET", f"/v1/responses/{LONG[:9000]}", {}),
        ("GET", f"/requests/{LONG[:9000]}", {}),
        ("GET", f"/requests/{LONG[:9000]}/stream", {}),
        ("GET", f"/requests/{LONG[:9000]}/timeline", {}),
        ("X" * 900, "/generate", {}),
        ("POST", "/generate", {"content-encoding": QUOTED_LONG[:9000]}),
        ("POST", "/generate", {"x-tenant": QUOTED_LONG[:9000]}),
        ("POST", "/generate", {"x-priority": QUOTED_LONG[:9000]}),
        ("POST", "/generate", {"x-deadline-ms": QUOTED_LONG[:9000]}),
    ],
)
async def test_of_long_paths_and_headers_it_has_the_beginning(
    client: httpx.AsyncClient, method: str, path: str, headers: dict[str, str]
) -> None:
    check_short(await client.request(method, path, json={"inputs": "a"}, headers=headers))


def test_values_are_quoted_as_python_writes_them() -> None:
    assert (quoted("a"), quoted(None), quoted(7), cut("a")) == ("'a'", "None", "7", "a")
    assert quoted("x" * 9999) == "'" + "x" * 199 + "…"
    assert cut("x" * 9999) == "x" * 200 + "…"
    error: ApiError = invalid("a" * 99_999, "x" * 9999)
    assert len(error.text) == 2000 and error.param == cut("x" * 9999)
