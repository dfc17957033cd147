"""A broker that lost a request, or its reader, is told; the answer still goes on at any gateway."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from common.broker.keys import Keys
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.resume.test_resume import BODY, LONG, read_frames, two_gateways
from tests.support.fleet.scripted_worker import Answer
from tests.support.sse import numbered
from tests.support.waiting import wait_until

KEYS = Keys("default")
FIELDS = ["digest", "channel", "gateway", "answer", "reader", "connection"]
HI: dict[str, Any] = {"prompt": "Hi", "stream": True}
Lose = Callable[[Redis, str], Awaitable[None]]


async def lose_request(redis: Redis, request_id: str) -> None:
    await redis.delete(KEYS.request(request_id), KEYS.tokens(request_id))


async def lose_reader(redis: Redis, request_id: str) -> None:
    """Set the request back to what it was before its client came back."""
    await redis.hdel(KEYS.request(request_id), "reader", "connection")  # type: ignore[misc]
    await redis.hset(KEYS.request(request_id), "gateway", "g1-test")  # type: ignore[misc]


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
            await worker.pause()
            request_id, relay = place.split("/")[2], gateway.pool.relay
            before = await worker.redis.hmget(KEYS.request(request_id), FIELDS)  # type: ignore[misc]
            await lose(worker.redis, request_id)
            relay.filler.offers.request_offer(relay.streams.values())
            await wait_until(lambda: relay.filler.offers.num_offers)
            assert await worker.redis.hmget(KEYS.request(request_id), FIELDS) == before  # type: ignore[misc]
            worker.step_s = 0.0
            worker.going.set()
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
        await worker.pause()
        before = await worker.redis.hmget(KEYS.request(request_id), FIELDS)  # type: ignore[misc]
        await lose_request(worker.redis, request_id)
        relay.filler.offers.request_offer(relay.streams.values())
        await wait_until(lambda: relay.filler.offers.num_offers)
        assert await worker.redis.hmget(KEYS.request(request_id), FIELDS) == before  # type: ignore[misc]
        worker.step_s = 0.0
        worker.going.set()
        rest, _ = await read_frames(other, place, None, last_id=3)
        assert [ordinal for ordinal, _ in numbered(first + rest)] == [
            *range(1, len(numbered(first + rest)) + 1)
        ]
        assert numbered(rest)[-1][1] == "[DONE]"
        await wait_until(lambda: not relay.streams and not gateway.pool.admission.waits)


async def test_a_gateway_that_ends_gives_up_no_request_whose_client_may_come_back(broker: Broker) -> None:
    endless = Answer(LONG.ids, ends=False)
    async with two_gateways(broker.url, endless) as (worker, gateway, client, _):
        await read_frames(client, "/generate_stream", BODY, 3)
        await wait_until(lambda: gateway.pool.admission.waits)
        num_said = await worker.redis.xlen(KEYS.control)
        gateway.fail_streams()
        await gateway.pool.admission.close()
        await wait_until(lambda: not gateway.pool.relay.streams)
        assert await worker.redis.xlen(KEYS.control) == num_said
