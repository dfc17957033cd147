"""Traces of a whole fleet, received by OTLP: one trace for each request, through kills. Its engines have no
model.
"""

import os
import secrets
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from api.admin.routes_fleet import read_timelines
from benchmarks.client import EventReader
from common.broker.pool_client import PoolClient
from tests.support.broker_state import KEYS
from tests.support.chaos.launcher import ChaosFleet
from tests.support.fleet.fleet import Fleet
from tests.support.jobs import Service
from tests.support.traces import CLIENT_SPAN, ReceivedSpan, Receiver, traceparent
from tests.support.waiting import wait_until, wait_until_sync

pytestmark = pytest.mark.slow

NUM_TOKENS = 60
KILLED_AT = 5
"""Tokens of a request when one of its processes is killed."""
INNER = ("queued", "infer", "prefill", "decode")


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver().listening() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def fleet(receiver: Receiver) -> Iterator[Fleet]:
    settings: dict[str, Any] = {
        "num_workers": 2,
        "num_gateways": 2,
        "num_batchers": 2,
        "otlp_endpoint": receiver.grpc_url,
        "otlp_service_name": "fleet-of-tests",
        "otel_bsp_schedule_delay": 50,
        "worker_ttl_s": 3,
    }
    with ChaosFleet(step_ms=10.0, **settings) as fleet:
        wait_until_sync(lambda: fleet.workers_ready() == 2)
        yield fleet


def body(num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    return {"inputs": "The sky", "parameters": {"max_new_tokens": num_tokens, "ignore_eos": True}}


async def traced(fleet: Fleet, trace_id: str, kill: Any = None) -> None:
    """Read a whole stream; `kill` is called with its request's id at KILLED_AT tokens."""
    reader, seen = EventReader(fleet.base_url), 0
    async for frame in reader.post("/generate_stream", body(), {"traceparent": traceparent(trace_id)}):
        seen += "token" in frame
        if seen == KILLED_AT and kill is not None:
            await kill(reader.place.split("/")[2])
    assert seen == NUM_TOKENS


def check_tree(spans: dict[str, list[ReceivedSpan]], request: str, generation: str) -> None:
    """One tree under the client's span; parts lie within the whole."""
    [root], [inner] = spans[request], spans[generation]
    assert (root.parent_id, inner.parent_id) == (CLIENT_SPAN, root.span_id)
    for name in ("queued", "infer", "decode"):
        assert {span.parent_id for span in spans[name]} == {inner.span_id}
    assert {span.parent_id for span in spans["prefill"]} <= {span.span_id for span in spans["infer"]}
    for span in (span for spans_of_name in spans.values() for span in spans_of_name):
        assert span.end_ns >= span.start_ns
        assert span.start_ns >= root.start_ns - 20_000_000, span.name
        assert span.resource["service.name"] == "fleet-of-tests"


async def test_a_stream_is_one_trace(fleet: Fleet, receiver: Receiver) -> None:
    trace_id = secrets.token_hex(16)
    await traced(fleet, trace_id)
    names = ("POST /generate_stream", "generate_stream", "validate", "tokenize", *INNER, "send_generation")
    spans = await receiver.whole_trace(trace_id, *names)
    assert sorted(spans) == sorted(names)
    assert {name: len(found) for name, found in spans.items()} == dict.fromkeys(names, 1)
    check_tree(spans, "POST /generate_stream", "generate_stream")
    [root], [inner], [decode] = spans[names[0]], spans[names[1]], spans["decode"]
    assert root.kind == 2
    assert root.attributes["http.request.method"] == "POST"
    assert root.attributes["url.path"] == "/generate_stream"
    assert root.attributes["http.response.status_code"] == 200
    assert inner.attributes["gen_ai.operation.name"] == "text_completion"
    assert inner.attributes["gen_ai.request.max_tokens"] == NUM_TOKENS
    assert inner.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert inner.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert decode.event_names == ["first_token"]
    assert decode.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert decode.end_ns - decode.start_ns > (NUM_TOKENS - 1) * 8_000_000


async def test_a_chat_is_one_trace_without_a_client_span(fleet: Fleet, receiver: Receiver) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "n": 2, "temperature": 0.5}
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.post(f"{fleet.base_url}/v1/chat/completions", json=chat)
        assert response.status_code == 200
    own_id = response.headers["x-request-id"]
    root: ReceivedSpan = await wait_until(
        lambda: next((s for s in receiver.spans if s.attributes.get("tokenfleet.request.id") == own_id), None)
    )
    names = ("POST /v1/chat/completions", *INNER, *INNER, "send_generation")
    spans = await receiver.whole_trace(root.trace_id, *names)
    assert len(spans["infer"]) == len(spans["decode"]) == 2, "one of each choice"
    [inner] = spans["chat_completions"]
    assert inner.attributes["gen_ai.operation.name"] == "chat"
    assert inner.attributes["gen_ai.request.temperature"] == 0.5
    assert inner.attributes["gen_ai.request.choice.count"] == 2
    assert inner.attributes["gen_ai.usage.output_tokens"] == 8


async def test_a_refused_request_has_its_status(fleet: Fleet, receiver: Receiver) -> None:
    trace_id = secrets.token_hex(16)
    async with httpx.AsyncClient(timeout=60) as client:
        wrong = {"inputs": "x", "parameters": {"max_new_tokens": 10**6}}
        headers = {"traceparent": traceparent(trace_id)}
        response = await client.post(f"{fleet.base_url}/generate", json=wrong, headers=headers)
        assert response.status_code == 422
    spans = await receiver.whole_trace(trace_id, "POST /generate", "validate")
    assert sorted(spans) == ["POST /generate", "generate", "tokenize", "validate"]
    assert spans["POST /generate"][0].attributes["http.response.status_code"] == 422
    assert not spans["POST /generate"][0].error, "the client is at fault"
    assert "max_new_tokens" in spans["validate"][0].error


async def worker_of(fleet: Fleet, request_id: str) -> str:
    async with Redis.from_url(fleet.redis_url) as redis:
        worker: bytes = await wait_until(lambda: redis.hget(KEYS.request(request_id), "worker"))
    return worker.decode()


async def has_begun(client: PoolClient, request_id: str) -> bool:
    """Whether the first token of a request is in its timeline: its batcher writes that ten times a second."""
    events = (await read_timelines(client, request_id)).get(request_id, [])
    return any(event["what"] == "prefilled" for event in events)


@pytest.mark.parametrize("kind", ["worker", "gateway", "batcher"])
async def test_a_killed_process_leaves_one_trace(fleet: Fleet, receiver: Receiver, kind: str) -> None:
    trace_id = secrets.token_hex(16)
    killed: list[str] = []

    async def kill(request_id: str) -> None:
        async with Redis.from_url(fleet.redis_url) as redis:
            client = PoolClient(redis, KEYS)
            await wait_until(lambda: has_begun(client, request_id))
            holder = (
                redis.get(KEYS.batcher) if kind == "batcher" else redis.hget(KEYS.request(request_id), kind)
            )
            killed.append((await holder).decode())
        os.kill(fleet.pid(killed[0].split("-")[0]), signal.SIGKILL)

    await traced(fleet, trace_id, kill)
    spans = await receiver.whole_trace(trace_id, *INNER, "send_generation", "POST /generate_stream")
    check_tree(spans, "POST /generate_stream", "generate_stream")
    [decode] = spans["decode"]
    if kind == "worker":
        first, second = spans["infer"]
        assert first.attributes["tokenfleet.worker"] == killed[0] != second.attributes["tokenfleet.worker"]
        assert "died" in first.error and not second.error
        assert second.links == [first.span_id]
        assert decode.event_names == ["first_token", "died", "resume"]
        assert decode.attributes["tokenfleet.attempts"] == 2
        assert len(spans["queued"]) == len(spans["prefill"]) == 2
    else:
        assert [len(spans[name]) for name in INNER] == [1, 1, 1, 1]
        assert decode.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    if kind == "gateway":
        assert spans["POST /generate_stream"][0].event_names == ["inherited"]
        assert spans["generate_stream"][0].attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
        [heir] = spans["send_generation"]
        assert len(heir.links) == 1, "the span of the gateway that was killed"
        wait_until_sync(lambda: {"g0", "g1"} <= fleet.pids().keys())


async def test_a_client_that_comes_back_is_in_the_same_trace(fleet: Fleet, receiver: Receiver) -> None:
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": traceparent(trace_id), "x-resume-seconds": "30"}
    async with httpx.AsyncClient(timeout=60, base_url=fleet.base_url) as client:
        async with client.stream("POST", "/generate_stream", json=body(), headers=headers) as response:
            rest = response.headers["content-location"]
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    break
        assert (await client.get(rest, headers={"last-event-id": "1"})).status_code == 200
    spans = await receiver.whole_trace(trace_id, *INNER, "send_generation", "send_generation")
    first, second = spans["send_generation"]
    assert second.links == [first.span_id] and not first.links
    check_tree(spans, "POST /generate_stream", "generate_stream")


async def test_a_job_whose_gateway_is_killed_is_one_trace(fleet: Fleet, receiver: Receiver) -> None:
    trace_id = secrets.token_hex(16)
    parameters = {"max_new_tokens": 600, "ignore_eos": True}
    async with Redis.from_url(fleet.redis_url) as redis:
        service, parent = Service(redis), traceparent(trace_id)
        await service.submit(id="claimed", inputs="The sky", parameters=parameters, traceparent=parent)
        channel = await wait_until(lambda: redis.hget(KEYS.request("claimed#0"), "channel"))
        await worker_of(fleet, "claimed#0")
        os.kill(fleet.pid(channel.decode().rsplit(":", 1)[1].split("-")[0]), signal.SIGKILL)
        await service.result("claimed")
    spans = await receiver.whole_trace(trace_id, "process submit", "generate", *INNER)
    check_tree(spans, "process submit", "generate")
    assert len(spans["process submit"]) == len(spans["decode"]) == 1
    wait_until_sync(lambda: {"g0", "g1"} <= fleet.pids().keys())
