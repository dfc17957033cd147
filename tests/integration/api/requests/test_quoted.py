"""An error repeats only the beginning of a client's input."""

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from api.errors import ApiError, cut, invalid, quoted
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer

LONG = "x" * 300_000
HUGE = 10**4000
MESSAGES = [{"role": "user", "content": "a"}]
CHAT = {"messages": MESSAGES}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": FUNCTION | function}


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"model": LONG}),
    ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": LONG, "function": FUNCTION}]}),
    ("/v1/chat/completions", CHAT | {"tools": [tool(name=LONG)]}),
    ("/v1/chat/completions", CHAT | {"tools": [tool(parameters={"type": LONG})]}),
    (
        "/v1/chat/completions",
        CHAT | {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": LONG}}},
    ),
    ("/v1/chat/completions", CHAT | {"tools": [tool()], "tool_choice": LONG}),
    ("/v1/chat/completions", CHAT | {"reasoning_effort": LONG}),
    ("/v1/chat/completions", CHAT | {"service_tier": LONG}),
    ("/v1/chat/completions", CHAT | {"priority": LONG}),
    ("/v1/chat/completions", CHAT | {"logit_bias": {LONG: 1}}),
    ("/v1/chat/completions", CHAT | {"logit_bias": {LONG: "a"}}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": LONG}}),
    (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "structural_tag", "format": {"type": LONG}}},
    ),
    ("/v1/chat/completions", CHAT | {"temperature": HUGE}),
    ("/v1/chat/completions", CHAT | {"max_tokens": HUGE, "seed": HUGE}),
    ("/v1/completions", {"prompt": "a", "n": HUGE}),
    ("/v1/completions", {"prompt": [HUGE]}),
    ("/v1/completions", {"prompt": "a", "best_of": HUGE}),
    ("/v1/responses", {"input": "a", "model": LONG}),
    ("/v1/responses", {"input": [{"type": LONG}]}),
    ("/v1/responses", {"input": [{"role": LONG, "content": "a"}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": LONG}]}]}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": LONG}]}),
    ("/v1/responses", {"input": "a", "previous_response_id": LONG}),
    ("/v1/responses", {"input": "a", "tools": [{"type": LONG}]}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": LONG}}}),
    ("/v1/responses", {"input": "a", "truncation": LONG}),
    ("/generate", {"inputs": "a", "parameters": {"best_of": HUGE}}),
    ("/generate", {"inputs": "a", "parameters": {"truncate": HUGE}}),
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": HUGE}}),
    ("/generate", {"inputs": "a", "parameters": {"logit_bias": {LONG: 1}}}),
    ("/vertex", {"instances": [CHAT | {"model": LONG}]}),
    ("/tokenize", {"prompt": "a", "model": LONG}),
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
        ("POST", "/generate", {"content-encoding": LONG[:9000]}),
        ("POST", "/generate", {"x-tenant": LONG[:9000]}),
        ("POST", "/generate", {"x-priority": LONG[:9000]}),
        ("POST", "/generate", {"x-deadline-ms": LONG[:9000]}),
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
