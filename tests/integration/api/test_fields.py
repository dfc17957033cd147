"""Fields that OpenAI's routes do not support, and names of models; only a few long texts are tokenized at
once, and an error repeats only the beginning of a client's input.
"""

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from api.http import body as bodies
from api.http.body import LABELS
from api.models import STARTED_S
from api.prompts.tokenizer import MAX_LONG, SHORT_BYTES, TextBudget
from api.protocols.chat import ChatRequest
from api.protocols.openai_bodies import UNSUPPORTED, CompletionRequest
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids, tokenizer_with
from tests.support.waiting import wait_until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
PROMPT: dict[str, Any] = {"prompt": "Hi"}


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[httpx.AsyncClient]:
    async with answering(broker.url, Answer(ids("x"))) as (_, _, client):
        yield client


async def test_unsupported_fields_are_named_unless_they_are_neutral(client: httpx.AsyncClient) -> None:
    for name, neutral in UNSUPPORTED.items():
        response = await client.post("/v1/chat/completions", json=CHAT | {name: "something"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
        assert response.json()["error"]["message"] == f"`{name}` is not supported yet"
        for value in (None, *neutral):
            assert (
                await client.post("/v1/chat/completions", json=CHAT | {name: value})
            ).status_code == 200, (name, value)


async def test_an_unknown_field_is_warned_of_once_and_the_names_are_bounded(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "warned", set())
    monkeypatch.setattr(bodies, "MAX_WARNED", 4)
    misspelt = {"max_token": 3, "nothing": None, "user": "u"}
    for path, sent in (
        ("/v1/chat/completions", CHAT | misspelt),
        ("/v1/chat/completions", CHAT | misspelt | {"modalities": ["text"]}),
        ("/generate", {"inputs": "Hi", "parameters": {"top_a": 1}, "max_new_tokens": 3}),
        ("/v1/completions", PROMPT | {"a": 1, "b": 1, "c": 1}),
    ):
        assert (await client.post(path, json=sent)).status_code == 200
    texts = [one.getMessage() for one in caplog.records if one.name == "api.http.body"]
    assert [text.split("'")[1] for text in texts] == ["max_token", "max_new_tokens", "top_a", "a"]


def test_every_field_of_openai_is_known() -> None:
    chat = set(chat_create_params.CompletionCreateParamsBase.__annotations__)
    completion = set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    assert chat <= set(ChatRequest.model_fields) | set(UNSUPPORTED) | LABELS
    assert completion <= set(CompletionRequest.model_fields) | set(UNSUPPORTED) | LABELS


async def test_models_are_listed_and_found_by_name(client: httpx.AsyncClient) -> None:
    for model in ("smollm2", "tgi", "dummy", "", None):
        answer = await client.post("/v1/chat/completions", json=CHAT | {"model": model})
        assert (answer.status_code, answer.json()["model"]) == (200, "smollm2")
    for answer in (
        await client.post("/v1/chat/completions", json=CHAT | {"model": "gpt-5"}),
        await client.post("/v1/completions", json=PROMPT | {"model": "gpt-5"}),
        await client.get("/v1/models/gpt-5"),
    ):
        error = {
            "message": "The model `gpt-5` does not exist; served: `smollm2`",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        assert (answer.status_code, answer.json()) == (404, {"error": error})
    known = {"id": "smollm2", "object": "model", "created": STARTED_S, "owned_by": "smollm2"}
    for path in ("/v1/models", "/v1/models/"):
        assert (await client.get(path)).json() == {"object": "list", "data": [known], "models": []}
    assert (await client.get("/v1/models/smollm2")).json() == known


async def test_best_of_is_n_and_hints_have_no_effect(client: httpx.AsyncClient) -> None:
    hints = {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k"}
    labels = hints | {"store": True, "safety_identifier": "s", "verbosity": "low"}
    for body in ({"n": 2, "best_of": 2}, {"n": 2, "best_of": 1}, {"best_of": 1}):
        chat = await client.post("/v1/chat/completions", json=CHAT | labels | body)
        completion = await client.post("/v1/completions", json=PROMPT | labels | body)
        for answer in (chat, completion):
            assert len(answer.json()["choices"]) == body.get("n", 1), answer.text


async def test_an_unknown_route_is_answered_with_the_known_ones(client: httpx.AsyncClient) -> None:
    missing = await client.post("/v1/audio/speech", json={})
    words = missing.json()["error"]["message"]
    assert missing.status_code == 404
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/models"):
        assert path in words
    for path in ("/chat/completions", "/openai/chat/completions"):
        assert "ends with /v1" in (await client.post(path, json=CHAT)).json()["error"]


async def test_the_error_for_a_long_prompt_has_the_code_and_the_sentence_that_clients_look_for(
    client: httpx.AsyncClient,
) -> None:
    """By these, litellm and LangChain trim the chat, or fall back to another model."""
    long = "a " * 2000
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 1024}),
        ("/v1/completions", {"prompt": long}),
        ("/v1/completions", PROMPT | {"max_tokens": 1024}),
        ("/v1/responses", {"input": long}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1024}),
    ):
        answer = await client.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), (path, error)
        assert "This model's maximum context length is 1024 tokens" in error["message"]


# --- text limits --------------------------------------------------------------------------------------------

LONG = "a " * 150_000
"""A text that is longer than the scripted worker's limit (1023 tokens), whatever its tokens are."""


async def test_a_long_text_that_is_truncated_is_served(broker: Broker) -> None:
    async with answering(broker.url, Answer([11])) as (worker, _, short_client):
        body = {"inputs": LONG, "parameters": {"truncate": 3, "max_new_tokens": 1}}
        assert (await short_client.post("/generate", json=body)).status_code == 200
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
    async with answering(broker.url, Answer([11])) as (_, gateway, short_client):
        budget = TextBudget(MAX_LONG + 1)
        gateway.pool.tokenizer = tokenizer_with(budget=budget)
        end = threading.Event()
        occupied = [asyncio.create_task(budget.run(2 * SHORT_BYTES, end.wait)) for _ in range(MAX_LONG)]
        try:
            await wait_until(budget.long.locked)
            waiting = asyncio.create_task(short_client.post(path, json=body))
            for _ in range(3):
                assert (await short_client.post("/tokenize", json={"inputs": "a " * 5000})).status_code == 200
            assert not waiting.done()
        finally:
            end.set()
        assert (await waiting).status_code == 200 and all(await asyncio.gather(*occupied))
        await wait_until(lambda: not budget.long.locked())


MANY_X = "x" * 300_000
HUGE = 10**4000
MESSAGES = [{"role": "user", "content": "a"}]
CHAT_OF = {"messages": MESSAGES}
LONG_FUNCTION = {"name": "f", "parameters": {"type": "object"}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": LONG_FUNCTION | function}


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT_OF | {"model": MANY_X}),
    ("/v1/chat/completions", {"messages": [{"role": MANY_X, "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": MANY_X}]}]}),
    ("/v1/chat/completions", CHAT_OF | {"tools": [tool(name=MANY_X)]}),
    ("/v1/chat/completions", CHAT_OF | {"tools": [tool(parameters={"type": MANY_X})]}),
    ("/v1/chat/completions", CHAT_OF | {"tools": [tool()], "tool_choice": MANY_X}),
    ("/v1/chat/completions", CHAT_OF | {"service_tier": MANY_X}),
    ("/v1/chat/completions", CHAT_OF | {"logit_bias": {MANY_X: 1}}),
    ("/v1/chat/completions", CHAT_OF | {"response_format": {"type": MANY_X}}),
    ("/v1/chat/completions", CHAT_OF | {"max_tokens": HUGE, "seed": HUGE}),
    ("/v1/completions", {"prompt": [HUGE]}),
    ("/v1/responses", {"input": [{"type": MANY_X}]}),
    ("/v1/responses", {"input": "a", "previous_response_id": MANY_X}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": MANY_X}}}),
    ("/generate", {"inputs": "a", "parameters": {"truncate": HUGE}}),
    ("/generate", {"inputs": "a", "parameters": {"logit_bias": {MANY_X: 1}}}),
    ("/vertex", {"instances": [CHAT_OF | {"model": MANY_X}]}),
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
async def short_client(broker: Broker) -> AsyncIterator[httpx.AsyncClient]:
    async with answering(broker.url, Answer([11])) as (_, _, short_client):
        yield short_client


def check_short(refused: httpx.Response) -> None:
    assert 400 <= refused.status_code < 500, refused.text[:1000]
    assert len(refused.text) < 1500, refused.text[:1500]
    assert max(map(len, re.findall("x+|[0-9]+", refused.text)), default=0) <= 200


async def test_of_a_long_value_the_error_has_the_beginning(short_client: httpx.AsyncClient) -> None:
    for path, body in BODIES:
        check_short(await short_client.post(path, json=body))
    for method, path, headers in HEADS:
        check_short(await short_client.request(method, path, json={"inputs": "a"}, headers=headers))
