"""A client that comes back with `Last-Event-ID`, at any gateway, misses nothing and gets nothing twice."""

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from api.lifecycle import Gateway
from api.requests import admission
from api.resume import attach
from api.streams.stream import Stream
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.resume.test_frames import REQUESTS
from tests.integration.api.test_server import healthy, start
from tests.support.fleet.gateways import nothing_left, ready, serving
from tests.support.fleet.resuming import ResumingClient
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.machine.ports import free_port
from tests.support.sse import data_of, numbered
from tests.support.tokenizer import TOKENIZER, ids, model_tokenizer
from tests.support.waiting import PATIENCE_S, wait_until

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


async def test_another_gateway_goes_on_after_the_last_frame(
    broker: Broker, subtests: pytest.Subtests
) -> None:
    async with two_gateways(broker.url) as (worker, _, client, other):
        for path, asked in REQUESTS:
            with subtests.test(path=path, asked=asked):
                body, num_seen = asked | {"stream": True, "resume_s": 600}, len(worker.seen)
                first, place = await read_frames(client, path, body, 5)
                rest, same_place = await read_frames(other, place, None, last_id=5)
                whole, _ = await read_frames(client, place, None)
                done = await other.get(place, headers={"last-event-id": str(len(numbered(whole)))})
                assert first + rest == whole and place == same_place
                ordinals = [ordinal for ordinal, _ in numbered(whole)]
                assert ordinals == [*range(1, len(ordinals) + 1)]
                assert done.status_code == 204
                assert len(worker.seen) - num_seen == num_choices(body)


async def test_an_attached_stream_is_offered_to_a_broker_that_returns(broker: Broker) -> None:
    async with two_gateways(broker.url, LONG, step_s=0.05) as (worker, one, client, other):
        first, place = await read_frames(other, "/generate_stream", BODY, 3)
        reader = asyncio.create_task(read_frames(client, place, None, last_id=3))
        relay = one.pool.relay
        await wait_until(lambda: relay.streams)
        relay.filler.offers.request_offer(relay.streams.values())
        await wait_until(lambda: relay.filler.offers.num_offers)
        worker.step_s = 0.0
        rest, _ = await reader
        whole, _ = await read_frames(client, place, None)
        assert first + rest == whole


async def test_tokens_that_move_while_they_are_read_are_read_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is trimmed after the string is read: neither has the tokens."""
    async with two_gateways(broker.url) as (_, _, client, other):
        first, place = await read_frames(client, "/generate_stream", BODY, 5)
        read, reads = attach.read_committed, 0

        async def read_badly(*args: Any) -> list[Stream]:
            nonlocal reads
            reads += 1
            streams = await read(*args)
            return [Stream(one.request, model_tokenizer()) for one in streams] if reads == 1 else streams

        monkeypatch.setattr(attach, "read_committed", read_badly)
        rest, _ = await read_frames(other, place, None, last_id=5)
        assert reads == 2
        whole, _ = await read_frames(other, place, None)
        assert first + rest == whole


async def test_a_killed_gateway_costs_its_streams_a_reconnect(broker: Broker) -> None:
    """In the middle of every kind of stream; the other gateway goes on with all of them."""
    ports = free_port(), free_port()
    own = [f"http://127.0.0.1:{port}" for port in ports]
    processes = [start(broker, f"g{i}", free_port(), GATEWAY_PORT=str(port)) for i, port in enumerate(ports)]
    try:
        async with (
            working(broker.url, TOKENIZER, lambda _: LONG, step_s=0.02) as worker,
            batching(broker.url),
        ):
            for url in own:
                await wait_until(lambda url=url: healthy(url))  # type: ignore[misc]
            worker.most_tokens = 10  # none ends before its gateway does
            clients = [ResumingClient(*own) for _ in range(2 * len(REQUESTS))]
            reads = [
                asyncio.create_task(client.read(path, body | {"stream": True}))
                for client, (path, body) in zip(clients, 2 * REQUESTS, strict=True)
            ]
            await wait_until(lambda: all(client.num_frames > 3 for client in clients))
            processes[0].kill()
            await wait_until(lambda: all(client.num_returns for client in clients))
            worker.most_tokens = sys.maxsize
            worker.step_s = 0.0
            contents = await asyncio.gather(*reads)
            assert len(worker.seen) == 2 * sum(num_choices(body) for _, body in REQUESTS)
            whole = [
                await ResumingClient(own[1]).read(path, body | {"stream": True}) for path, body in REQUESTS
            ]
        differ = [
            i
            for i, (content, expected) in enumerate(zip(contents, 2 * whole, strict=True))
            if without_names(content) != without_names(expected)
        ]
        assert differ == []
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def without_names(content: bytes) -> bytes:
    """Without request ids, times and seeds: they differ between two requests of the same content."""
    return re.sub(rb'"(id":"\w+-[0-9a-f]{32}"|created":\d+|seed":\d+)', b"", content)


def num_choices(body: dict[str, Any]) -> int:
    return len(body.get("prompt", "x")) * int(body.get("n", 1))


async def test_a_disconnect_cancels_unless_the_client_may_come_back(broker: Broker) -> None:
    endless = Answer(LONG.ids * 20, ends=False)
    async with two_gateways(broker.url, endless) as (worker, gateway, client, other):
        _, place = await read_frames(client, "/generate_stream", {"inputs": "Hi"}, 3)
        await nothing_left(gateway, worker)
        assert (await other.get(place)).status_code == 404
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
    monkeypatch.setattr(admission, "CLOSE_TIMEOUT_S", 10 * PATIENCE_S)
    async with working(broker.url, TOKENIZER, lambda _: Answer(LONG.ids, ends=False)) as worker:
        async with asyncio.timeout(PATIENCE_S), serving(broker.url) as (gateway, client):
            await ready(gateway)
            await read_frames(client, "/generate_stream", BODY, 3)
            await wait_until(lambda: gateway.pool.admission.waits)
        assert len(worker.live) == 1


async def test_the_time_stops_when_the_client_is_back(broker: Broker) -> None:
    """At any gateway: the gateway that it left counts no longer."""
    async with two_gateways(broker.url, LONG, step_s=0.05) as (_, _, client, other):
        _, place = await read_frames(client, "/generate_stream", {"inputs": "Hi", "resume_s": 2}, 3)
        rest, _ = await read_frames(other, place, None, last_id=3)
    assert numbered(rest)[-1][0] == len(LONG.ids) + 1


async def test_a_finished_answer_waits_for_its_client(broker: Broker) -> None:
    async with two_gateways(broker.url) as (worker, gateway, client, other):
        whole, place = await read_frames(client, "/generate_stream", BODY)
        await wait_until(lambda: not gateway.pool.admission.cleanups)
        rest, _ = await read_frames(other, place, None, last_id=4)
        assert whole.endswith(rest) and numbered(rest)[0][0] == 5
        request_id = place.split("/")[2]
        for key in (worker.keys.request(request_id), worker.keys.tokens(request_id)):
            assert 0 < await worker.redis.pttl(key) <= 600_000


async def test_a_detached_request_needs_no_client(broker: Broker) -> None:
    async with two_gateways(broker.url, gateway_grace_s=0) as (worker, gateway, client, other):
        _, place = await read_frames(
            client, "/v1/completions", {"prompt": "a", "stream": True, "detached": True}, 1
        )
        await wait_until(lambda: not worker.live and not gateway.pool.admission.cleanups)
        assert worker.seen[0].gateway == "" and worker.seen[0].result_ttl_ms == 3_600_000
        content, _ = await read_frames(other, place, None)
        assert numbered(content)[-1][1] == "[DONE]"


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
    endless = Answer(LONG.ids, ends=False)
    async with two_gateways(broker.url, endless) as (_, _, client, other):
        _, place = await read_frames(client, "/generate_stream", BODY, 2)
        for wrong in ("-1", "x", "1.5", "", "999999", "9" * 40):
            refused = await other.get(place, headers={"last-event-id": wrong})
            assert refused.status_code == 422 and "`Last-Event-ID`" in refused.json()["error"], wrong
        bare = await other.post("/v1/completions", json={"prompt": "a"}, headers={"last-event-id": "3"})
        assert bare.status_code == 400 and bare.json()["error"]["param"] == "Last-Event-ID"


async def test_the_same_post_with_last_event_id_goes_on(broker: Broker) -> None:
    body = {"prompt": "a", "stream": True, "resume_s": 60}
    async with two_gateways(broker.url) as (worker, _, client, other):
        first, place = await read_frames(client, "/v1/completions", body, 2)
        headers = {"last-event-id": "2", "x-request-id": place.split("/")[2]}
        rest = await other.post("/v1/completions", json=body, headers=headers)
        frames = numbered(first + rest.content)
        assert [ordinal for ordinal, _ in frames] == [*range(1, len(frames) + 1)]
        assert frames[-1][1] == "[DONE]"
        assert len(worker.seen) == 1


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


async def test_wrong_terms_are_refused_by_name(broker: Broker) -> None:
    wrong: list[tuple[dict[str, str], dict[str, Any], str]] = [
        ({"x-resume-seconds": "nan"}, {}, "x-resume-seconds"),
        ({"x-resume-seconds": "3601"}, {}, "x-resume-seconds"),
        ({"x-resume-seconds": "5"}, {"resume_s": 5}, "resume_s"),
        ({}, {"resume_s": -1}, "resume_s"),
        ({}, {"resume_s": 5, "detached": True}, "detached"),
        ({}, {"detached": True, "stream": False}, "detached"),
        ({}, {"resume_s": 5, "stream": False}, "resume_s"),
    ]
    async with two_gateways(broker.url) as (_, _, client, _):
        for headers, terms, name in wrong:
            body = {"prompt": "a", "stream": True} | terms
            refused = await client.post("/v1/completions", json=body, headers=headers)
            assert refused.status_code == 400, name
            assert f"`{name}`" in refused.json()["error"]["message"]
