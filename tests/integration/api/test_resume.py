"""A client that comes back with `Last-Event-ID`, at any gateway, misses nothing and gets nothing twice,
also after the broker lost writes; several answers go on over one connection; any gateway shows and cancels
a request; and one that is sent again with its `Idempotency-Key` is computed once.
"""

import asyncio
import contextlib
import math
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from redis.asyncio import Redis

from api.answers.answer import HttpAnswer
from api.app import Gateway
from api.requests import request_scripts
from api.requests.request_scripts import cancel_request
from api.streams import relay as relay_module
from benchmarks.client import EventReader, StreamBroken
from common.broker.committed import read_slice
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.messages.codec import decode
from common.messages.records import unpack_ids
from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.support.answers import CHAT, data_of, numbered
from tests.support.broker_state import KEYS
from tests.support.fleet.batchers import batching
from tests.support.fleet.gateways import GatewayProcesses, answering, nothing_left, ready, serving
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.keys.issued import bearer
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import PATIENCE_S, wait_for, wait_until

ANSWER = Answer(ids(" one two é🙂 three four five six seven eight nine ten"))
LONG = Answer(ids(" one two é🙂 three four five" * 8))
BODY: dict[str, Any] = {"inputs": "Hi", "resume_s": 600}


@contextlib.asynccontextmanager
async def two_gateways(
    url: str, answer: Answer = ANSWER, step_s: float = 0.01, **settings: Any
) -> AsyncIterator[tuple[FakeWorker, Gateway, httpx.AsyncClient, httpx.AsyncClient]]:
    async with (
        working(url, TOKENIZER, lambda _: answer, step_s=step_s) as worker,
        serving(url, **settings) as (one, client),
        serving(url, name="g1-test", **settings) as (other, other_client),
    ):
        await ready(one)
        await ready(other)
        yield worker, one, client, other_client


async def read_frames(
    client: httpx.AsyncClient, path: str, body: dict[str, Any] | None, count: int = 10**6, last_id: int = 0
) -> tuple[bytes, str]:
    """Return the first frames of a stream, and where it goes on; then close the connection."""
    method, headers = ("GET" if body is None else "POST"), {"last-event-id": str(last_id)} if last_id else {}
    async with client.stream(method, path, json=body, headers=headers) as response:
        if response.status_code != 200:
            raise AssertionError(f"{response.status_code} {await response.aread()!r}")
        seen = b""
        async for chunk in response.aiter_raw():
            seen += chunk
            if seen.count(b"\n\n") >= count:
                break
        frames = seen.split(b"\n\n")[:-1][:count]
        return b"".join(frame + b"\n\n" for frame in frames), response.headers["content-location"]


async def test_a_killed_gateway_costs_its_streams_a_reconnect(broker: Broker) -> None:
    """In the middle of every kind of stream; the other gateway goes on with all of them."""
    with GatewayProcesses(broker.url) as gateways:
        async with (
            working(broker.url, TOKENIZER, lambda _: LONG, step_s=0.02) as worker,
            batching(broker.url),
        ):
            await gateways.until_healthy()
            worker.most_tokens = 10  # none ends before its gateway does
            readers = [EventReader(gateways.urls[0]) for _ in 2 * REQUESTS]
            reads = [
                asyncio.create_task(read_on(reader, gateways.urls[1], path, body))
                for reader, (path, body) in zip(readers, 2 * REQUESTS, strict=True)
            ]
            await wait_until(lambda: all(reader.num_seen > 3 for reader in readers))
            gateways.processes[0].kill()
            await wait_until(lambda: {reader.url.geturl() for reader in readers} == {gateways.urls[1]})
            worker.most_tokens = sys.maxsize
            worker.step_s = 0.0
            contents = await asyncio.gather(*reads)
            assert len(worker.seen) == 2 * sum(num_choices(body) for _, body in REQUESTS)
            alone = [await read_on(EventReader(gateways.urls[1]), "", path, body) for path, body in REQUESTS]
            assert contents == 2 * alone


async def read_on(reader: EventReader, other: str, path: str, body: dict[str, Any]) -> list[Any]:
    """The frames of a stream, which goes on at another gateway when the first one dies. Those of two requests
    differ in ids, times and seeds, which are left out.
    """
    found = []
    frames = reader.post(path, body | {"stream": True})
    while True:
        try:
            async for frame in frames:
                found.append({name: value for name, value in frame.items() if name not in ("id", "created")})
                (frame.get("details") or {}).pop("seed", None)
            return found
        except (StreamBroken, OSError):
            assert reader.place, "the gateway died before it answered"
            reader.url = urlsplit(other)
            frames = reader.go_on()


def num_choices(body: dict[str, Any]) -> int:
    return len(body.get("prompt", "x")) * int(body.get("n", 1))


async def test_a_request_is_cancelled_when_its_client_has_not_come_back_in_time(broker: Broker) -> None:
    async with two_gateways(broker.url, ENDLESS) as (worker, _, client, other):
        headers = {"x-resume-seconds": "0.3"}
        async with client.stream("POST", "/generate_stream", json={"inputs": "Hi"}, headers=headers) as first:
            place = first.headers["content-location"]
            await anext(first.aiter_raw())
        await wait_until(lambda: not worker.live)
        gone = await other.get(place, headers={"last-event-id": "1"})
        assert gone.status_code == 410 and "nobody came back" in gone.json()["error"]


async def test_a_gateway_that_ends_waits_for_no_client(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request goes on without it."""
    monkeypatch.setattr("api.requests.pool.CLOSE_TIMEOUT_S", 10 * PATIENCE_S)
    async with working(broker.url, TOKENIZER, lambda _: Answer(LONG.ids, ends=False)) as worker:
        async with asyncio.timeout(PATIENCE_S), serving(broker.url) as (gateway, client):
            await ready(gateway)
            await read_frames(client, "/generate_stream", BODY, 3)
            await wait_until(lambda: gateway.pool.waits)
        assert len(worker.live) == 1


async def test_the_time_stops_when_the_client_is_back(broker: Broker) -> None:
    """At any gateway: the gateway that it left counts no longer."""
    async with two_gateways(broker.url, LONG, step_s=0.05) as (_, _, client, other):
        _, place = await read_frames(client, "/generate_stream", {"inputs": "Hi", "resume_s": 1}, 3)
        rest, _ = await read_frames(other, place, None, last_id=3)
    assert numbered(rest)[-1][0] == len(LONG.ids) + 1


TEXT, RESPONSE = {"prompt": "a", "stream": True}, {"input": "a", "stream": True}
LIVES: list[tuple[dict[str, Any], Any, Any, bool]] = [
    (TEXT, None, 0.0, False),
    (TEXT | {"resume_s": 0}, 0.0, 0.0, True),
    (TEXT | {"resume_s": 60}, 60.0, 60.0, True),
    (TEXT | {"detached": True}, math.inf, 3600.0, True),
    (RESPONSE | {"store": False}, None, 0.0, True),
    (RESPONSE | {"resume_s": 60}, 60.0, 86_400.0, True),
    (RESPONSE | {"background": True}, math.inf, 86_400.0, True),
]
"""Bodies, for how long their answers go on without a client and are kept, and whether frames have numbers."""


@pytest.mark.parametrize("repeatable", [False, True])
async def test_an_answers_life_is_two_numbers(broker: Broker, repeatable: bool) -> None:
    lives = [(math.inf, 86_400.0, life[-1]) if repeatable else tuple(life) for _, *life in LIVES]
    async with answering(broker.url, ENDLESS) as (worker, _, client):
        for i, (body, *_) in enumerate(LIVES):
            headers = {"idempotency-key": f"k{i}"} if repeatable else {}
            path = "/v1/responses" if "input" in body else "/v1/completions"
            async with client.stream("POST", path, json=body, headers=headers) as response:
                key = KEYS.request(response.headers["content-location"].split("/")[2])
                data = await worker.redis.hget(key, "answer")  # type: ignore[misc]
            answer = decode(HttpAnswer, data)
            assert (answer.terms.goes_on_s, answer.terms.kept_s, answer.numbered) == lives[i], body
        await wait_until(lambda: len(worker.seen) == len(LIVES))
        assert [(one.gateway == "", one.kept_ms) for one in worker.seen] == [
            (goes_on_s == math.inf, 1000 * max(600, kept_s)) for goes_on_s, kept_s, _ in lives
        ]


async def test_an_answer_belongs_to_the_key_that_made_it(broker: Broker) -> None:
    mine = {"authorization": "Bearer mine"}
    async with two_gateways(broker.url, api_key=None) as (worker, _, client, other):
        client.headers.update(mine)
        _, place = await read_frames(client, "/generate_stream", BODY, 2)
        for headers in ({}, {"authorization": "Bearer other"}):
            refused = await other.get(place, headers=headers)
            assert refused.status_code == 404 and "There is no streamed answer" in refused.json()["error"]
        assert (await other.get(place, headers=mine)).status_code == 200
        unknown = [f"/requests/{'0' * 32}/stream", "/requests/x/stream", "/requests/*/stream"]
        assert [(await other.get(path)).status_code for path in unknown] == [404] * 3
        assert b"mine" not in b"".join([await worker.redis.dump(key) for key in await worker.redis.keys("*")])


async def test_a_wrong_last_event_id_is_refused_by_name(broker: Broker) -> None:
    async with two_gateways(broker.url, ENDLESS) as (_, _, client, other):
        _, place = await read_frames(client, "/generate_stream", BODY, 2)
        for wrong in ("-1", "x", "1.5", "", "999999", "9" * 40):
            refused = await other.get(place, headers={"last-event-id": wrong})
            assert refused.status_code == 422 and "`Last-Event-ID`" in refused.json()["error"], wrong
        bare = await other.post("/v1/completions", json={"prompt": "a"}, headers={"last-event-id": "3"})
        assert bare.status_code == 400 and bare.json()["error"]["param"] == "Last-Event-ID"
        twice = await client.post("/generate_stream", json=BODY, headers={"x-resume-seconds": "5"})
        assert twice.status_code == 422 and "`resume_s`" in twice.json()["error"]


async def test_the_newest_connection_has_the_answer(broker: Broker) -> None:
    """An older connection, whose client has gone unnoticed, neither cancels nor deletes the request."""
    async with two_gateways(broker.url, LONG) as (worker, gateway, client, _):
        async with client.stream("POST", "/generate_stream", json={"inputs": "Hi"}) as former:
            chunks = former.aiter_raw()
            await anext(chunks)
            place = former.headers["content-location"]
            content, _ = await read_frames(client, place, None)
            left = b"".join([chunk async for chunk in chunks])
        assert b'"error_type":"superseded"' in left
        assert len(data_of(content)) == len(LONG.ids) + 1
        await nothing_left(gateway, worker)


NUM_STREAMS = 8
"""More than the connections that a browser opens."""


async def begin(client: httpx.AsyncClient, count: int = 0, **fields: Any) -> tuple[str, bytes]:
    """Begin an answer, and hang up after `count` frames. Returns its id and the frames."""
    frames, place = await read_frames(client, "/generate_stream", BODY | fields, count)
    return place.split("/")[2], frames


def by_answer(merged: bytes) -> dict[str, bytes]:
    """The frames of each answer, with their own ids again."""
    frames: dict[str, bytes] = {}
    for frame in merged.split(b"\n\n")[:-1]:
        found = re.fullmatch(rb"id: ([0-9a-f]{32})/(.*)", frame, re.DOTALL)
        assert found is not None, frame
        frames[found[1].decode()] = frames.get(found[1].decode(), b"") + b"id: " + found[2] + b"\n\n"
    return frames


async def test_each_answer_goes_on_after_its_last_frame_at_any_gateway(broker: Broker) -> None:
    async with two_gateways(broker.url) as (worker, gateway, client, other):
        begun = [await begin(client if i % 2 else other, i) for i in range(NUM_STREAMS)]
        places = [f"{answer_id}/{i}" if i else answer_id for i, (answer_id, _) in enumerate(begun)]
        merged = await other.post("/requests/streams", json={"streams": places})
        assert merged.headers["content-type"].startswith("text/event-stream")
        rests = by_answer(merged.content)
        for answer_id, first in begun:
            whole, _ = await read_frames(client, f"/requests/{answer_id}/stream", None)
            assert first + rests[answer_id] == whole
        seen = [f"{answer_id}/{len(numbered(first + rests[answer_id]))}" for answer_id, first in begun]
        assert (await client.post("/requests/streams", json={"streams": seen})).status_code == 204
        assert len(worker.seen) == NUM_STREAMS
        await wait_until(lambda: not gateway.pool.relay.streams)


async def test_an_answer_that_pauses_holds_up_no_other(broker: Broker) -> None:
    """Unlike the choices of one answer."""
    text = ids(" one two three four")
    async with (
        serving(broker.url) as (gateway, client),
        working(broker.url, TOKENIZER, lambda asked: Answer(text, ends=asked.stopping.max_new_tokens > 50)),
    ):
        await ready(gateway)
        paused, _ = await begin(client, parameters={"max_new_tokens": 50})
        other, _ = await begin(client)
        async with client.stream("POST", "/requests/streams", json={"streams": [paused, other]}) as response:
            seen = b""
            async for chunk in response.aiter_raw():
                seen += chunk
                if b'"generated_text":" one two three four"' in seen:
                    break
        assert len(numbered(by_answer(seen)[paused])) == len(text)


async def test_a_client_that_leaves_cancels_nothing_that_waits_for_it(broker: Broker) -> None:
    async with two_gateways(broker.url, LONG, step_s=0.05) as (worker, gateway, client, other):
        begun = [await begin(client) for _ in range(2)]
        ids_of_answers = [answer_id for answer_id, _ in begun]
        async with other.stream("POST", "/requests/streams", json={"streams": ids_of_answers}) as response:
            await anext(response.aiter_raw())
        worker.step_s = 0.0
        merged = by_answer((await client.post("/requests/streams", json={"streams": ids_of_answers})).content)
        assert len({len(numbered(frames)) for frames in merged.values()}) == 1
        await wait_until(lambda: not gateway.pool.relay.streams)


async def test_what_cannot_be_read_is_refused_by_name(broker: Broker) -> None:
    async with two_gateways(broker.url) as (_, _, client, _):
        known, _ = await begin(client)
        wrong: list[tuple[Any, int, str]] = [
            ([], 422, "`streams`"),
            (["5"], 422, "`streams`"),
            ([known, f"{known}/1"], 422, "twice"),
            ([known, f"{known[:-1]}{'1' if known[-1] == '0' else '0'}"], 404, "no streamed answer"),
            ([f"{known}/99999"], 422, "Last-Event-ID"),
            ([known] * 65, 422, "64"),
        ]
        for streams, status, words in wrong:
            refused = await client.post("/requests/streams", json={"streams": streams})
            assert (refused.status_code, words in refused.json()["error"]) == (status, True), refused.text


USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate_stream", {"inputs": "Hi", "parameters": {"details": True, "top_n_tokens": 2}}),
    ("/", {"inputs": "Hi", "stream": True, "parameters": {"seed": 3, "do_sample": True}}),
    ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2} | USAGE),
    ("/v1/chat/completions", CHAT | {"stop": ["zzz", " six"], "skip_special_tokens": False}),
    ("/v1/chat/completions", CHAT | {"n": 2, "tools": TOOLS} | USAGE),
    ("/v1/chat/completions", CHAT | {"tools": TOOLS, "logprobs": True} | IDS | USAGE),
    ("/v1/completions", {"prompt": ["a é", "b"], "logprobs": 1} | IDS),
    ("/v1/completions", {"prompt": ["a é", "b"], "n": 2, "echo": True, "logprobs": 1} | USAGE),
]


OWN = {"authorization": "Bearer own", "x-priority": "interactive", "x-tenant": "acme"}
OTHER = {"authorization": "Bearer other"}
TWO_CHOICES = {"prompt": "Hi", "stream": True, "n": 2}
ENDLESS = Answer(ids(" one two three" * 500), ends=False)


async def states(client: httpx.AsyncClient, request_id: str) -> list[str]:
    """Return the states of the request and of its choices."""
    found = (await client.get(f"/requests/{request_id}", headers=OWN)).json()
    return [found["state"], *(choice["state"] for choice in found["choices"])]


async def test_a_request_is_shown_and_cancelled_at_any_gateway(broker: Broker) -> None:
    async with two_gateways(broker.url, ENDLESS) as (worker, gateway, client, other):
        async with client.stream("POST", "/v1/completions", json=TWO_CHOICES, headers=OWN) as response:
            request_id = response.headers["content-location"].split("/")[2]
            lines = response.aiter_lines()
            await anext(lines)
            path = f"/requests/{request_id}"
            shown = (await other.get(path, headers=OWN)).json()
            assert (shown["id"], shown["priority"], shown["tenant"]) == (request_id, "interactive", "acme")
            assert shown["prompt_tokens"] > 0 and len(shown["choices"]) == 2
            for method in ("GET", "DELETE"):
                assert (await other.request(method, path, headers=OTHER)).status_code == 404
                assert (await other.request(method, path)).status_code == 404
            assert "cancelled" not in await states(other, request_id), "another key cancels nothing"
            cancelled = await other.delete(path, headers=OWN)
            assert cancelled.json()["state"] == "cancelled"
            rest = [line async for line in lines]
        assert any("cancelled" in line for line in rest)
        await nothing_left(gateway, worker)


async def test_a_cancelled_request_is_shown_although_its_reader_has_deleted_it(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancel_and_wait(pool: PoolClient, request_id: str) -> bool:
        is_cancelled = await cancel_request(pool, request_id)
        await wait_for(lambda: pool.redis.exists(pool.keys.request(request_id)), 0)
        return is_cancelled

    async def read_slowly(pool: PoolClient, offsets: dict[str, int], of_ended: bool) -> Any:
        states = await read_slice(pool, offsets, of_ended)
        await wait_until(lambda: pool.redis.strlen(pool.keys.tokens(*offsets)))  # its worker spills meanwhile
        return states

    monkeypatch.setattr(relay_module, "read_slice", read_slowly)
    monkeypatch.setattr(request_scripts, "cancel_request", cancel_and_wait)
    async with two_gateways(broker.url, ENDLESS) as (worker, gateway, client, other):
        body = TWO_CHOICES | {"n": 1, "max_tokens": 1000}
        async with client.stream("POST", "/v1/completions", json=body, headers=OWN) as response:
            path = f"/requests/{response.headers['content-location'].split('/')[2]}"
            lines = response.aiter_lines()
            assert [(await anext(lines))[:6] for _ in range(8)] == ["data: ", ""] * 4
            cancelled = (await other.delete(path, headers=OWN)).json()
        assert [one["state"] for one in (cancelled, *cancelled["choices"])] == ["cancelled"] * 2
        assert cancelled["choices"][0]["generated_tokens"] >= 2
        assert (await other.get(path, headers=OWN)).status_code == 404
        await nothing_left(gateway, worker)


FIELDS = ["digest", "channel", "gateway", "answer", "reader", "connection"]
HI: dict[str, Any] = {"prompt": "Hi", "stream": True}
Lose = Callable[[Redis, str], Awaitable[None]]


async def lose_request(redis: Redis, request_id: str) -> None:
    await redis.delete(KEYS.request(request_id), KEYS.tokens(request_id))


async def lose_reader(redis: Redis, request_id: str) -> None:
    """Set the request back to what it was before its client came back."""
    await redis.hdel(KEYS.request(request_id), "reader", "connection")  # type: ignore[misc]
    await redis.hset(KEYS.request(request_id), "gateway", "g1-test")  # type: ignore[misc]


async def lose_and_offer(worker: FakeWorker, gateway: Gateway, request_id: str, lose: Lose) -> None:
    """What the broker loses of a request, its gateway offers it again; then the worker goes on."""
    await worker.pause()
    before = await worker.redis.hmget(KEYS.request(request_id), FIELDS)  # type: ignore[misc]
    await lose(worker.redis, request_id)
    relay = gateway.pool.relay
    relay.filler.offers.request_offer(relay.streams.values())
    await wait_until(lambda: relay.filler.offers.num_offers)
    assert await worker.redis.hmget(KEYS.request(request_id), FIELDS) == before  # type: ignore[misc]
    worker.step_s = 0.0
    worker.going.set()


@pytest.mark.parametrize(
    ("returns", "lose"), [(False, lose_request), (True, lose_request), (True, lose_reader)]
)
async def test_an_answer_goes_on_at_any_gateway_after_the_broker_lost_writes(
    broker: Broker, returns: bool, lose: Lose
) -> None:
    """`returns`: the client came back once before."""
    async with two_gateways(broker.url, LONG, step_s=0.05) as (worker, gateway, client, other):
        seen, place, method, headers = b"", "/generate_stream", "POST", {}
        if returns:
            seen, place = await read_frames(other, place, BODY, 3)
            method, headers = "GET", {"last-event-id": "3"}
        body = None if returns else BODY
        async with client.stream(method, place, json=body, headers=headers) as response:
            chunks, place = response.aiter_raw(), response.headers["content-location"]
            while len(numbered(seen)) < 5:
                seen += await anext(chunks)
            await lose_and_offer(worker, gateway, place.split("/")[2], lose)
            seen += await anext(chunks)
            assert b"error" not in seen
            seen = seen[: seen.rindex(b"\n\n") + 2]
        rest, _ = await read_frames(other, place, None, last_id=len(numbered(seen)))
        frames = numbered(seen + rest)
        assert [ordinal for ordinal, _ in frames] == [*range(1, len(LONG.ids) + 2)]


@pytest.mark.parametrize("terms", [{"detached": True}, {"resume_s": 600}])
async def test_a_request_whose_client_has_left_is_offered_by_its_gateway(
    broker: Broker, terms: dict[str, Any]
) -> None:
    """Also after a token that the client has seen, and that must not change."""
    async with two_gateways(broker.url, LONG, step_s=0.05) as (worker, gateway, client, other):
        first, place = await read_frames(client, "/v1/completions", HI | terms, 3)
        request_id, relay = place.split("/")[2], gateway.pool.relay
        await wait_until(lambda: relay.streams[request_id].left)
        await lose_and_offer(worker, gateway, request_id, lose_request)
        rest, _ = await read_frames(other, place, None, last_id=3)
        assert [ordinal for ordinal, _ in numbered(first + rest)] == [
            *range(1, len(numbered(first + rest)) + 1)
        ]
        assert numbered(rest)[-1][1] == "[DONE]"
        await wait_until(lambda: not relay.streams and not gateway.pool.waits)


# --- messages that are lost ---------------------------------------------------------------------------------

TEXTS = [
    "The lighthouse keeper counted the ships every evening, one by one, "
    "and wrote their names in a blue book.",
    "🙂🚀🎉 emoji party: 👩‍👩‍👧‍👦 🏳️‍🌈 and नमस्ते, आप कैसे हैं? 日本の首都は東京です。",
    "def main():\n\tpass\n\n\n   # e\u0301 \u200b end",
]


def scripted(request: Generate) -> Answer:
    """The prompt is the number of the text."""
    number = int(TOKENIZER.decode(unpack_ids(request.prompt_ids)).split()[-1])
    return Answer(TOKENIZER.encode(TEXTS[number % len(TEXTS)]).ids)


async def converse(client: httpx.AsyncClient, count: int) -> list[bytes]:
    bodies = [{"inputs": f"text {i}", "parameters": {"details": True}} for i in range(count)]
    answers = await asyncio.gather(*(client.post("/generate_stream", json=body) for body in bodies))
    assert {answer.status_code for answer in answers} == {200}
    return [answer.content for answer in answers]


async def undisturbed(broker: Broker, count: int) -> list[bytes]:
    async with answering(broker.url, scripted) as (worker, gateway, client):
        answers = await converse(client, count)
        await nothing_left(gateway, worker)
        return answers


async def test_streams_finish_with_all_messages_lost(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "SILENCE_S", 0.2)
    monkeypatch.setattr(relay_module, "AUDIT_S", 0.1)
    expected = await undisturbed(broker, 3)
    async with answering(broker.url, scripted, lose=lambda: True) as (worker, gateway, client):
        assert await converse(client, 3) == expected
        await nothing_left(gateway, worker)


async def test_cut_connections_change_no_byte(broker: Broker) -> None:
    expected = await undisturbed(broker, 6)
    async with answering(broker.url, scripted, step_s=0.01) as (worker, gateway, client):
        worker.most_tokens = 5  # none ends before all have begun
        talk = asyncio.create_task(converse(client, 6))
        await wait_until(lambda: len(worker.live) == 6)
        worker.most_tokens = sys.maxsize
        for _ in range(3):
            await worker.redis.client_kill_filter(_type="pubsub")
            await wait_until(lambda: not gateway.pool.relay.subscribed.is_set())
            await wait_until(gateway.pool.relay.subscribed.is_set)
        assert await talk == expected
        await nothing_left(gateway, worker)


# --- repetitions --------------------------------------------------------------------------------------------

REPEATED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
    ("/v1/chat/completions", CHAT | {"n": 2}),
    ("/v1/responses", {"input": "Hi", "store": False}),
    ("/generate", {"inputs": "Hi", "parameters": {"return_context_logits": True}}),
    ("/v1/completions", {"prompt": "a", "return_generation_logits": True}),
]
"""Answers of more than one choice, that are not stored, and with logits."""
PLAIN = {"inputs": "Hi"}


def keyed(key: str) -> dict[str, str]:
    return {"idempotency-key": key}


async def test_a_repetition_gets_the_same_answer_at_any_gateway(broker: Broker) -> None:
    async with two_gateways(broker.url) as (worker, _, client, other):
        for number, (path, body) in enumerate(REPEATED):
            before, headers = len(worker.seen), keyed(f"key-{number}")
            first, again = [await each.post(path, json=body, headers=headers) for each in (client, other)]
            assert (again.status_code, again.content) == (200, first.content), path
            assert again.headers["content-type"] == first.headers["content-type"]
            assert len(worker.seen) - before == num_choices(body)


async def test_the_order_of_fields_does_not_count_and_another_body_is_409(broker: Broker) -> None:
    async with two_gateways(broker.url) as (worker, _, client, other):
        headers = keyed('"k1"') | {"content-type": "application/json"}
        body = b'{"inputs": "Hi", "parameters": {"seed": 1, "do_sample": true}}'
        same = b'{"parameters":{"do_sample":true,"seed":1},"inputs":"Hi"}'
        first = await client.post("/generate", content=body, headers=headers)
        again = await other.post("/generate", content=same, headers=headers | keyed("k1"))
        assert again.content == first.content
        deep = b'{"inputs": "Hi", "x": ' + b"[" * 260 + b"]" * 260 + b"}"
        refused = await client.post("/generate", content=deep, headers=headers | keyed("k2"))
        assert refused.status_code == 400 and "more than 201 levels deep" in refused.json()["error"]
        differs = await other.post("/generate", json=PLAIN, headers=keyed("k1"))
        other_route = await other.post("/", content=body, headers=headers)
        openai = await other.post("/v1/completions", json={"prompt": "a"}, headers=keyed("k1"))
        assert [one.status_code for one in (differs, other_route, openai)] == [409, 409, 409]
        assert "same route and body" in differs.json()["error"]
        assert openai.json()["error"]["code"] == "idempotency_key_reused"
        assert len(worker.seen) == 1


async def test_repetitions_wait_for_a_request_that_runs(broker: Broker) -> None:
    """The client that asked first has its answer, too; and if it leaves, the request goes on."""
    async with two_gateways(broker.url, LONG) as (worker, _, client, other):
        worker.most_tokens = 3
        posts = [
            asyncio.create_task(each.post("/generate", json=PLAIN, headers=keyed("k")))
            for each in (client, other) * 5
        ]
        await wait_until(lambda: worker.live)
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/generate", json=PLAIN, headers=keyed("k"), timeout=0.3)
        worker.most_tokens = 10**6
        answers = await asyncio.gather(*posts)
        assert {one.status_code for one in answers} == {200} and len({one.content for one in answers}) == 1
        assert sum("idempotency-replayed" not in one.headers for one in answers) == 1
        assert len(worker.seen) == 1


async def test_a_request_whose_client_left_is_there_for_its_repetition(broker: Broker) -> None:
    async with two_gateways(broker.url, LONG) as (worker, one, client, other):
        worker.most_tokens = 3
        for path, key in (("/generate", "a"), ("/generate_stream", "b")):
            with pytest.raises(httpx.ReadTimeout):
                await client.post(path, json=PLAIN, headers=keyed(key), timeout=0.3)
        worker.most_tokens = 10**6
        await wait_until(lambda: not one.pool.relay.streams)
        for path, key in (("/generate", "a"), ("/generate_stream", "b")):
            answer = await other.post(path, json=PLAIN, headers=keyed(key))
            assert answer.status_code == 200 and "five" in answer.text
        assert len(worker.seen) == 2


async def test_what_was_refused_or_failed_does_not_take_the_key(broker: Broker) -> None:
    script = [Answer(ids(" one two"), error="forward"), Answer(ids(" one two"))]
    async with two_gateways(broker.url, max_total_tokens=64) as (worker, _, client, other):
        worker.answer = lambda _: script[min(1, len(worker.seen) - 1)]
        invalid = await client.post("/generate", json={"inputs": ""}, headers=keyed("k"))
        failed = await client.post("/generate", json=PLAIN, headers=keyed("k"))
        served = await other.post("/generate", json=PLAIN, headers=keyed("k"))
        assert [one.status_code for one in (invalid, failed, served)] == [422, 424, 200]
        assert "idempotency-replayed" not in served.headers


async def test_a_key_belongs_to_its_tenant_and_has_a_form(broker: Broker) -> None:
    async with two_gateways(broker.url) as (worker, _, client, _):
        for tenant in ("one", "two"):
            answer = await client.post("/generate", json=PLAIN, headers=keyed("k") | bearer(tenant))
            assert answer.status_code == 200 and "idempotency-replayed" not in answer.headers
        assert len(worker.seen) == 2
        for wrong in ("", "a b", "x" * 256):
            refused = await client.post("/generate", json=PLAIN, headers=keyed(wrong))
            assert refused.status_code == 400 and "idempotency-key" in refused.json()["error"]
        assert len(worker.seen) == 2


async def test_kept_answers_are_bounded_and_expire(
    broker: Broker, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only answers of admitted requests take the place of older ones."""
    monkeypatch.setattr("api.requests.request_scripts.MAX_STORED", 2)
    settings: dict[str, Any] = {"answer_ttl_s": 7200, "max_concurrent_requests": 1}
    async with answering(broker.url, Answer(ids(" one")), **settings) as (worker, _, client):
        for number in range(4):
            await client.post("/generate", json=PLAIN, headers=keyed(str(number)))
        kept = await redis.keys(Keys("default").request("*"))
        assert len(kept) == 2
        assert [7_000 < await redis.ttl(key) <= 7_200 for key in kept] == [True, True]
        await worker.pause()
        waiting = asyncio.create_task(client.post("/generate", json=PLAIN))
        await wait_until(lambda: redis.xlen(worker.keys.requests))
        for number in range(4, 7):
            refused = await client.post("/generate", json=PLAIN, headers=keyed(str(number)))
            assert refused.status_code == 429
        worker.going.set()
        await waiting
        newest, oldest = [
            await client.post("/generate", json=PLAIN, headers=keyed(number)) for number in ("3", "0")
        ]
        assert "idempotency-replayed" in newest.headers and "idempotency-replayed" not in oldest.headers
        assert len(worker.seen) == 6
