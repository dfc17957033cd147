"""Malformed input over HTTP, in the broker's streams and on its channels: a client gets an error that names
the cause, no process ends, and the fleet serves on.
"""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import msgpack
import pytest
import redis

from common.broker.keys import Keys
from common.messages import events
from common.messages.codec import encode
from common.messages.records import pack_ids
from common.messages.request import Generate, StoppingParams
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load
from tests.support.waiting import PATIENCE_S, wait_until, wait_until_sync

KEYS = Keys("default")
TGI = ["/", "/generate", "/generate_stream", "/tokenize", "/chat_tokenize"]
OPENAI = ["/v1/chat/completions", "/v1/completions"]


@pytest.fixture(autouse=True)
def the_same_processes_serve_afterwards(fleet: Fleet) -> Iterator[None]:
    before = fleet.pids()
    yield
    body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 1}}
    assert httpx.post(f"{fleet.base_url}/generate", json=body, timeout=PATIENCE_S).json() == {
        "generated_text": " Paris"
    }
    assert fleet.pids() == before, fleet.errors()[-2000:]


# --- HTTP ---------------------------------------------------------------------------------------------------

BODIES = {
    "empty": b"",
    "all bytes": bytes(range(256)),
    "no object": b"[1]",
    "too large": b"[" * 3_000_000,
    "deep": b'{"inputs":' * 99_999,
    "deep, but JSON": b'{"prompt":%s,"inputs":%s,"messages":%s}' % ((b"[" * 150 + b"]" * 150,) * 3),
    "invalid UTF-8": b'{"inputs":"\xff","prompt":"\xc3\x28","messages":"\xed\xa0\x80"}',
    "a lone surrogate": b'{"inputs":"\\ud800","prompt":"\\udfff","messages":"\\ud800"}',
    "UTF-16": '{"inputs":"a"}'.encode("utf-16"),
    "a huge number": b'{"inputs":' + b"9" * 5000 + b"}",
    "wrong types": b'{"inputs":{"a":1},"prompt":{"a":1},"messages":{"a":1}}',
    "wrong types within": b'{"inputs":[1.5],"prompt":[[1.5]],"messages":[[1.5]]}',
}


def error_status(answer: httpx.Response, path: str) -> int:
    """Return the status of an answer, which must be an error object of the path's API."""
    error = answer.json()
    assert len(answer.headers["x-request-id"]) == 32
    if path in OPENAI:
        assert set(error["error"]) == {"message", "type", "param", "code"} and error["error"]["message"]
    else:
        assert set(error) == {"error", "error_type"} and error["error"]
    return answer.status_code


def test_malformed_bodies_get_an_error_object(fleet: Fleet) -> None:
    json_type = {"content-type": "application/json"}
    with httpx.Client(base_url=fleet.base_url, timeout=PATIENCE_S) as http:
        for path in TGI + OPENAI:
            for name, content in BODIES.items():
                answer = http.post(path, content=content, headers=json_type)
                assert error_status(answer, path) in (400, 413, 422), (path, name)


# --- the broker ---------------------------------------------------------------------------------------------

DEEP = b"\x91" * 100_000 + b"\x00"
PAYLOADS = [
    b"",
    b"\xc1",
    b"\xff" * 1000,
    b"garbage",
    DEEP,
    msgpack.packb({"v": 1}),
    msgpack.packb({"v": 99}),
    msgpack.packb([1, 2]),
]
PAYLOADS += [
    msgpack.packb(
        {"v": 1, "id": {"a": 1}, "s": 5, "q": "x", "e": -1, "n": 2**63, "u": None, "t": [5], "i": b"\xff"}
    )
]


def entries(*fields: str) -> list[Any]:
    return [*({field: payload} for field in fields for payload in PAYLOADS), {b"\xff\x00": b"\xff"}]


@pytest.fixture
def broker(fleet: Fleet) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fleet.redis_url) as client:
        yield client


def test_the_batcher_removes_malformed_stream_entries(broker: redis.Redis) -> None:
    for stream, fields in {
        KEYS.requests: ["generate"],
        KEYS.control: ["cancel", "died", "worker_ready"],
    }.items():
        for entry in entries(*fields):
            broker.xadd(stream, entry)
    wait_until_sync(lambda: broker.xlen(KEYS.requests) == 0)


async def test_an_id_that_the_model_does_not_have_fails_its_request_alone(
    fleet: Fleet, broker: redis.Redis
) -> None:
    """The forward raises for it, on workers that stream other answers meanwhile."""
    load = Load(fleet, 40, count=6)
    await load.progress(3)
    for i in range(4):
        request = Generate(f"poison{i}", "d", pack_ids([504, 10**6]), StoppingParams(5))
        broker.hset(KEYS.request(request.request_id), mapping={"digest": "d", "attempt": 0, "base": 0})
        broker.xadd(KEYS.requests, {"generate": encode(request)})
    for i in range(4):
        key = KEYS.request(f"poison{i}")
        await wait_until(partial(broker.hexists, key, "terminal"))
        error_type, error = events.ERRORS["forward"]
        assert broker.hmget(key, ["error_type", "error"]) == [error_type.encode(), error.encode()]
    assert [len(ids) for ids in await load.whole()] == [40] * 6
    await wait_until(lambda: broker.xlen(KEYS.requests) == 0)


def test_gateways_skip_malformed_events_and_refuse_malformed_reply_channels(broker: redis.Redis) -> None:
    """Events on the channels of gateways; names in `reply_to` of a job."""
    for key in broker.scan_iter(KEYS.gateway("*")):
        for payload in PAYLOADS:
            assert broker.publish(KEYS.events(key.decode().rpartition(":")[2]), payload)
    for i, name in enumerate(
        [
            "events:g0",
            "ext:",
            "ext:a b",
            "ext:\x00",
            "ext:" + "a" * 999,
            "ext:é",
            "ext:a\n",
            "EXT:a",
            "",
            5,
            ["ext:a"],
            {},
        ]
    ):
        broker.xadd(KEYS.submit, {"job": json.dumps({"id": f"channel{i}", "inputs": "a", "reply_to": name})})
        answer = json.loads(wait_until_sync(partial(broker.get, KEYS.result(f"channel{i}"))))
        assert "reply_to" in answer["error"], name


def test_malformed_jobs_are_removed_from_their_queues(fleet: Fleet, broker: redis.Redis) -> None:
    for entry in entries("job", "cancel"):
        broker.xadd(KEYS.submit, entry)
    wait_until_sync(lambda: broker.xlen(KEYS.submit) == 0)
    for i, payload in enumerate(PAYLOADS):
        broker.set(f"arq:job:garbage{i}", payload)
        broker.zadd(KEYS.arq_queue, {f"garbage{i}": 1})
    wait_until_sync(lambda: broker.zcard(KEYS.arq_queue) == 0)
