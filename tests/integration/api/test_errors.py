"""Errors have the object of their API family, and repeat only the beginning of a client's input; the
OpenAPI document is true of every route; fields that OpenAI's routes do not support, names of models, and
long texts, of which only a few are tokenized at once.
"""

import asyncio
import json
import re
import shlex
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from api.errors import ApiError, conflict, failed, invalid, openai, overloaded, unavailable
from api.http import body as bodies
from api.http.body import LABELS
from api.models import STARTED_S
from api.prompts.tokenizer import MAX_LONG, SHORT_BYTES, TextBudget
from api.protocols.chat import ChatRequest
from api.protocols.openai_bodies import UNSUPPORTED, CompletionRequest
from common.messages.events import Terminal, terminal_for
from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_routes import LONG, document, validator
from tests.support import brokers
from tests.support.answers import CHAT, SEQUENCES, openai_error, tgi_error
from tests.support.fleet.batchers import batching
from tests.support.fleet.gateways import answering, ready, serving
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.pooling.pooling_gateway import pooling_gateway
from tests.support.pooling.tiny_encoders import save_encoder
from tests.support.source_tree import ROOT
from tests.support.tokenizer import TOKENIZER, ids, tokenizer_with
from tests.support.waiting import PATIENCE_S, wait_until

JSON = {"content-type": "application/json"}


async def test_unreadable_bodies_are_refused(broker: Broker) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(10_000):
            yield b" " * 1000

    async with answering(broker.url, Answer([1]), payload_limit=5000) as (_, _, client):
        assert tgi_error(await client.post("/generate", content=endless(), headers=JSON)) == (
            413,
            "payload_too_large",
        )
        packed = await client.post("/generate", content=b"x", headers=JSON | {"content-encoding": "gzip"})
        assert tgi_error(packed) == (415, "unsupported_media_type") and "Encoding: gzip`" in packed.text
        odd = {"content-type": "Application/vnd.api+JSON; charset=utf-8", "content-encoding": "identity"}
        assert (await client.post("/generate", content=b'{"inputs":"a"}', headers=odd)).status_code == 200
        large = b'{"inputs":"' + b"a" * 4900 + b'","parameters":{"truncate":5}}'
        assert (await client.post("/generate", content=large, headers=JSON)).status_code == 200
        for content in (b'{"inputs":"a"} b', b'{"inputs":"\xff"}', b'{"inputs":"\\ud800"}', b"[" * 4000):
            refused = await client.post("/generate", content=content, headers=JSON)
            assert tgi_error(refused) == (400, "invalid_json") and "Invalid JSON" in refused.text
        vast = b'{"inputs":"a","parameters":{"max_new_tokens":1' + b"0" * 4900 + b"}}"
        assert "out of range" in (await client.post("/generate", content=vast, headers=JSON)).text


async def test_unknown_routes_are_404_and_unknown_methods_405(broker: Broker) -> None:
    async with serving(broker.url) as (_, client):
        assert tgi_error(await client.get("/nothing")) == (404, "not_found")
        assert tgi_error(await client.get("/v11")) == (404, "not_found")
        assert (await client.post("/v2/nothing")).json() == {"error": "Not Found: POST /v2/nothing"}
        wrong = await client.get("/generate")
        assert tgi_error(wrong) == (405, "method_not_allowed") and wrong.headers["allow"] == "POST"
        assert (await client.put("/")).headers["allow"] == "GET, HEAD, POST"
        for path in ("/v1", "/v1/nothing"):
            assert openai_error(await client.get(path)) == (404, "invalid_request_error", None)
        wrong = await client.get("/v1/completions")
        assert (
            openai_error(wrong) == (405, "invalid_request_error", None) and wrong.headers["allow"] == "POST"
        )


REFUSALS = [
    (ApiError(400, "invalid_json", "x"), 400, "invalid_request_error", None),
    (ApiError(401, "unauthorized", "x"), 401, "authentication_error", "invalid_api_key"),
    (
        ApiError(404, "model_not_found", "x", "model", "model_not_found"),
        404,
        "invalid_request_error",
        "model_not_found",
    ),
    (ApiError(413, "payload_too_large", "x"), 413, "invalid_request_error", None),
    (ApiError(415, "unsupported_media_type", "x"), 415, "invalid_request_error", None),
    (invalid("x", "stop"), 400, "invalid_request_error", None),
    (failed(Terminal("r", "error", 0, "two workers died")), 500, "server_error", "generation"),
    (failed(terminal_for("r", "timeout", 0)), 408, "timeout", "timeout"),
    (failed(terminal_for("r", "expired", 0)), 408, "timeout", "timeout"),
    (failed(terminal_for("r", "no_worker", 0)), 500, "server_error", "unavailable"),
    (failed(terminal_for("r", "client", 0)), 500, "server_error", "cancelled"),
    (failed(terminal_for("r", "grammar", 0)), 400, "invalid_request_error", "grammar"),
    (failed(terminal_for("r", "grammar_limit", 0)), 400, "invalid_request_error", "grammar"),
    (conflict("request"), 409, "invalid_request_error", "conflict"),
    (overloaded(), 429, "rate_limit_exceeded", "rate_limit_exceeded"),
    (unavailable("no worker"), 503, "server_error", "unavailable"),
]


@pytest.mark.parametrize(("refusal", "status", "kind", "code"), REFUSALS)
def test_openai_s_error_object(refusal: ApiError, status: int, kind: str, code: str | None) -> None:
    answer = {"error": {"message": refusal.text, "type": kind, "param": refusal.param, "code": code}}
    assert openai(refusal) == (status, answer)


async def test_health_is_503_until_a_worker_is_ready(broker: Broker) -> None:
    async with batching(broker.url), serving(broker.url) as (gateway, client):
        for path in ("/health", "/ping", "/readyz", "/"):
            assert tgi_error(await client.get(path)) == (503, "healthcheck")
        async with working(broker.url, TOKENIZER, lambda _: Answer([1])):
            await ready(gateway)
            for path in ("/health", "/ping", "/readyz", "/"):
                health = await client.get(path)
                assert (health.status_code, health.content) == (200, b"")
                assert (await client.head(path)).status_code == 200
        assert "/generate_stream" in (await client.get("/api-doc/openapi.json")).json()["paths"]


@pytest.fixture(scope="module")
def described() -> Any:
    return document()


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from nodes(child)


def test_every_reference_leads_somewhere(described: Any) -> None:
    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert {node["$ref"] for node in nodes(described) if isinstance(node.get("$ref"), str)} <= known
    assert not any("$defs" in node for node in nodes(described))
    assert operation_ids(described) == sorted(set(operation_ids(described)))


def test_every_route_that_takes_an_idempotency_key_describes_it_and_its_conflict(described: Any) -> None:
    posts = {path: methods["post"] for path, methods in described["paths"].items() if "post" in methods}
    taking = {path for path, operation in posts.items() if "idempotency-key" in headers_of(operation)}
    assert taking == {path for path, operation in posts.items() if "x-priority" in headers_of(operation)}
    assert {"/generate", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank", "/vertex"} <= taking
    assert not {"/tokenize", "/v1/batches"} & taking
    for path in taking:
        shape = posts[path]["responses"]["503"]["content"]
        assert posts[path]["responses"]["409"]["content"] == shape, path


def headers_of(operation: dict[str, Any]) -> set[str]:
    return {one["name"].lower() for one in operation.get("parameters", []) if one["in"] == "header"}


def operation_ids(document: dict[str, Any]) -> list[str]:
    return sorted(
        operation["operationId"] for methods in document["paths"].values() for operation in methods.values()
    )


async def test_routes_that_need_an_api_key_say_so(broker: Broker, described: Any) -> None:
    places: list[Any] = [{"HTTPBearer": []}, {"APIKeyHeader": []}]
    async with serving(broker.url, api_key="sesame") as (_, client):
        document = (await client.get("/api-doc/openapi.json")).json()
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                needs_key = (await client.request(method, path)).status_code == 401
                assert operation.get("security", []) == (places if needs_key else []), path
    assert document["components"]["securitySchemes"] == {
        "HTTPBearer": {"type": "http", "scheme": "bearer"},
        "APIKeyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    without_key = described["paths"]["/generate"]["post"]
    assert without_key["security"] == [*places, {}], "a key is optional while there is none"


def test_generators_of_clients_can_read_every_schema(described: Any) -> None:
    """openapi-python-client leaves out what has a list of values beside alternatives, or an array of what is
    not known.
    """
    for node in nodes(described):
        assert "anyOf" not in node or not {"enum", "const"} & {*node}, node
        assert node.get("type") != "array" or "items" in node, node


def test_the_bodies_of_the_docs_are_as_described(described: Any) -> None:
    text = "".join(page.read_text() for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    plain = re.sub(r"'\$\(.*?\)'", "", text)
    found = re.findall(
        r":3000(/\S+) -H 'Content-Type: application/json'[ \\\n]*-d '(.*?)'\n", plain, re.DOTALL
    )
    assert len(found) > 5
    for path, body in found:
        check_body(described, path, json.loads(body))


def check_body(described: Any, path: str, body: Any) -> None:
    template = path.replace("/smollm2/", "/{model}/")
    content = described["paths"][template]["post"]["requestBody"]["content"]
    validator(json.dumps(content["application/json"]["schema"])).validate(body)


def test_every_operation_has_a_tag_a_summary_a_description_and_a_plain_id(described: Any) -> None:
    tags = {tag["name"]: tag["description"] for tag in described["tags"]}
    used, summaries = set[str](), list[str]()
    for path, methods in described["paths"].items():
        for operation in methods.values():
            [tag] = operation["tags"]
            used.add(tag)
            summaries.append(operation["summary"])
            assert re.fullmatch(r"[A-Z][a-z]+[\w ,'()/]+", operation["summary"]), path
            assert operation["description"].endswith("."), path
            assert re.fullmatch(r"[a-z]+(_[a-z]+)*", operation["operationId"]), path
    assert used == set(tags)
    assert len(set(summaries)) == len(summaries)


def test_every_part_of_a_path_is_described_and_no_error_has_another_shape_than_ours(described: Any) -> None:
    listed = described["paths"]["/v1/responses/{response_id}/input_items"]["get"]["responses"]
    assert "400" in listed and "422" not in listed
    assert "422" in described["paths"]["/requests/{request_id}/stream"]["get"]["responses"]
    assert not any("HTTPValidationError" in str(node) for node in described["components"]["schemas"])
    for node in nodes(described["paths"]):
        assert node.get("in") != "path" or node["description"].endswith("."), node


async def test_the_introduction_s_commands_work(broker: Broker) -> None:
    async with answering(broker.url, Answer([5, 6]), api_key="sesame") as (_, pool, client):
        description = (await client.get("/api-doc/openapi.json")).json()["info"]["description"]
        commands = [shlex.split(one) for one in re.findall(r"```shell\n(.*?)```", description, re.DOTALL)]
        assert len(commands) == 2
        for curl, url, *flags in commands:
            assert curl == "curl" and url.startswith(f"http://localhost:{pool.settings.port}/")
            values = [value for flag, value in pairwise(flags) if flag in ("-H", "-d")]
            *lines, data = [value.replace("$API_KEY", "sesame") for value in values]
            headers = dict(line.split(": ") for line in lines)
            path = "/" + url.split("/", 3)[3]
            response = await client.post(path, headers=headers, content=data)
            assert response.status_code == 200, response.text
            assert ("data: [DONE]" in response.text) == bool(json.loads(data).get("stream"))


def answer(request: Generate) -> Answer:
    """Three tokens, or as many as the request allows where the end-of-sequence token does not end it; of a
    beam search up to four sequences.
    """
    number = request.stopping.max_new_tokens if request.stopping.ignore_eos else 1
    return Answer([5, 6] * number, beams=SEQUENCES)


EMBED_PATHS = ("/v1/embeddings",)
SCORE_PATHS = ("/v1/rerank", "/v1/score")


@pytest.fixture
def base_urls(
    shared_broker: Broker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """Gateways with fake workers: of a model that generates, one that embeds and one that classifies. They
    serve in another thread, because schemathesis blocks this one, and end with the test: they would take
    jobs of the next one, whose broker is the same.
    """
    brokers.empty(shared_broker)  # of what tests before have left
    started, urls, stops = threading.Event(), dict[str, str](), list[Any]()
    url, embeds, scores = shared_broker.url, *(tmp_path_factory.mktemp(name) for name in ("embeds", "scores"))
    encoder, classifier = save_encoder(embeds, "BERT"), save_encoder(scores, "BERT", num_labels=1)

    async def serve() -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        async with (
            batching(url),
            answering(url, answer, files_dir=str(tmp_path_factory.mktemp("files"))) as (_, _, client),
            pooling_gateway(url, embeds, encoder, pool="embeds") as (_, _, embedder),
            pooling_gateway(url, scores, classifier, "classify", pool="scores") as (_, _, scorer),
        ):
            urls.update(dict.fromkeys(EMBED_PATHS, str(embedder.base_url)))
            urls.update(dict.fromkeys(SCORE_PATHS, str(scorer.base_url)))
            urls[""] = str(client.base_url)
            stops.append(lambda: loop.call_soon_threadsafe(stopped.set))
            started.set()
            await stopped.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(PATIENCE_S)
    yield lambda path: urls.get(path, urls[""])
    stops[0]()
    thread.join()


@pytest.mark.parametrize("thoroughly", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "all"])
def test_every_route_is_as_described(
    base_urls: Callable[[str], str], described: Any, thoroughly: bool, subtests: pytest.Subtests
) -> None:
    from tests.support.clients import described_routes  # a second, in each of the processes that collect

    described_routes.try_routes(described, base_urls, thoroughly, subtests.test)


# --- fields and texts ---------------------------------------------------------------------------------------

PROMPT: dict[str, Any] = {"prompt": "Hi"}


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[httpx.AsyncClient]:
    async with answering(broker.url, Answer(ids("x"), beams=SEQUENCES)) as (_, _, client):
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
    known = {
        "id": "smollm2",
        "object": "model",
        "created": STARTED_S,
        "owned_by": "smollm2",
        "root": "smollm2",
        "parent": None,
        "max_model_len": 1024,
    }
    for path in ("/v1/models", "/v1/models/"):
        assert (await client.get(path)).json() == {"object": "list", "data": [known], "models": []}
    assert (await client.get("/v1/models/smollm2")).json() == known


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
    """By these, litellm and LangChain trim the chat, or fall back to another model; so does Claude Code."""
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
    message = {"messages": [{"role": "user", "content": long}], "max_tokens": 9}
    words = (await client.post("/v1/messages", json=message)).json()["error"]["message"]
    found = re.match(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", words, re.IGNORECASE)
    assert found and int(found[1]) > int(found[2]) == 1023 and "`messages`" in words, words


# --- text limits --------------------------------------------------------------------------------------------


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


# --- bodies that are described ------------------------------------------------------------------------------

MESSAGE = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OF_SCHEMA = {"type": "json_schema", "name": "p", "schema": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "7"}]}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}], "content": None}
OWN_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "7"}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
TURN = CHAT["messages"][0]
DESCRIBED: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        CHAT | TOOLS | {"tool_choice": "required"},
        CHAT | TOOLS | {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        CHAT | {"functions": [{"name": "f"}], "function_call": {"name": "f"}},
        CHAT | {"response_format": {"type": "json_schema", "json_schema": OF_SCHEMA}},
        CHAT | {"response_format": {"type": "regex", "value": "a+"}},
        CHAT | {"structured_outputs": {"choice": ["a", "b"], "regex": None}},
        {"messages": [TURN, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "7"}]},
        {"messages": [TURN, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}]},
    ],
    "/v1/messages": [
        MESSAGE | {"messages": [TURN, USE, RESULT]},
        MESSAGE | {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
        MESSAGE | {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        MESSAGE | {"output_config": {"format": OF_SCHEMA}},
    ],
    "/v1/responses": [
        {"input": [TURN, THOUGHT, OWN_CALL, OUTPUT]},
        {"input": "a", "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"},
        {"input": "a", "tools": [{"type": "mcp"}]},
        {"input": "a", "text": {"format": OF_SCHEMA}},
    ],
    "/generate": [{"inputs": "a", "parameters": {"grammar": {"type": "json", "value": SCHEMA}}}],
    "/v1/completions": [PROMPT | {"use_beam_search": True, "best_of": 2, "early_stopping": 3}],
    "/invocations": [PROMPT, CHAT],
    "/tokenize": [PROMPT, CHAT],
}


@pytest.mark.parametrize(("path", "body"), [(path, one) for path, all in DESCRIBED.items() for one in all])
async def test_what_is_accepted_is_described(
    client: httpx.AsyncClient, described: Any, path: str, body: dict[str, Any]
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    check_body(described, path, body)
    shape = described["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    validator(json.dumps(shape)).validate(answer.json())


async def test_the_content_of_a_file_is_described_as_bytes(
    broker: Broker, described: Any, tmp_path: Path
) -> None:
    async with serving(broker.url, files_dir=str(tmp_path)) as (_, client):
        sent: dict[str, Any] = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        file = (await client.post("/v1/files", **sent)).json()
        content = await client.get(f"/v1/files/{file['id']}/content")
    shown = described["paths"]["/v1/files/{file_id}/content"]["get"]["responses"]["200"]["content"]
    assert [*shown] == [content.headers["content-type"]] == ["application/octet-stream"]


# --- errors are short ---------------------------------------------------------------------------------------

MANY_X = "x" * 300_000
HUGE = 10**4000
LONG_FUNCTION = {"name": "f", "parameters": {"type": "object"}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": LONG_FUNCTION | function}


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


def check_short(refused: httpx.Response) -> None:
    assert 400 <= refused.status_code < 500, refused.text[:1000]
    assert len(refused.text) < 1500, refused.text[:1500]
    assert max(map(len, re.findall("x+|[0-9]+", refused.text)), default=0) <= 200


async def test_of_a_long_value_the_error_has_the_beginning(client: httpx.AsyncClient) -> None:
    for path, body in BODIES:
        check_short(await client.post(path, json=body))
    for method, path, headers in HEADS:
        check_short(await client.request(method, path, json={"inputs": "a"}, headers=headers))
