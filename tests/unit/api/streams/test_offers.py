"""What a gateway offers to a broker that lost it, against real scripts."""

from collections.abc import Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from api.requests.request_scripts import OfferReply
from api.streams.relay import Relay
from api.streams.stream import Stream
from batcher import batcher_scripts
from common.broker.committed import Committed, read
from common.broker.lua import run_script
from common.broker.pool_client import PoolClient
from common.messages.codec import decode, encode
from common.messages.events import Events, Terminal, Tokens, pack_tokens
from common.messages.records import pack_columns, unpack_records
from common.messages.request import Cancel, Generate, Resume
from tests.support.events import IDS, KEYS, end, event_message, new_stream, tokens
from tests.support.waiting import wait_until


async def publish(relay: Relay, number: int, *events: Tokens | Terminal, source: str = "w1") -> None:
    """A message that has come."""
    list(relay.deliver(event_message(number, *events, source=source)))


async def shown(
    relay: Relay, num_tokens: int, source: str = "w1", attempt: int = 1, **options: Any
) -> Stream:
    """A stream with tokens that a worker made."""
    stream = new_stream(channel=relay.channel, gateway="g0", **options)
    relay.add(stream)
    relay.note_admitted(stream)
    if num_tokens:
        await publish(relay, 1, tokens(0, num_tokens, attempt), source=source)
    return stream


async def put(redis: Redis, num_tokens: int, worker: str = "w1", attempt: int = 1, base: int = 0) -> None:
    """The request as the broker has it."""
    fields = {"digest": "d", "worker": worker, "attempt": attempt, "base": base, "width": 1, "cached": 0}
    await redis.hset(KEYS.request("r"), mapping=fields)  # type: ignore[misc]
    if num_tokens:
        await redis.set(KEYS.tokens("r"), pack_tokens(tokens(0, num_tokens)))


async def offer(relay: Relay, stream: Stream) -> None:
    relay.filler.offers.request_offer([stream])
    await wait_until(lambda: relay.filler.offers.num_offers)


async def committed(redis: Redis) -> Committed:
    return (await read(PoolClient(redis, KEYS), ["r"]))["r"]


async def ids(redis: Redis) -> Sequence[int]:
    return unpack_records((await committed(redis)).records)[0]


async def resumes(redis: Redis) -> list[str]:
    """What the batcher is told to resume."""
    entries = await redis.xrange(KEYS.control)
    return [decode(Resume, fields[b"resume"]).request_id for _, fields in entries]


async def test_a_request_that_is_gone_is_queued_again_after_its_tokens(redis: Redis, relay: Relay) -> None:
    stream = await shown(relay, 3)
    stream.answer = b"an answer"
    stream.prompt.num_cached = 16
    relay.filler.request_fill([stream])
    await wait_until(lambda: relay.filler.offers.num_offers)
    [(entry_id, fields)] = await redis.xrange(KEYS.requests)
    request = decode(Generate, fields[b"generate"])
    assert (request.request_id, request.num_shown, request.digest) == ("r", 3, "d")
    assert 0 < request.ttl_ms <= stream.request.ttl_ms
    taken = str(len(fields[b"generate"])).encode()
    assert await redis.hget(KEYS.places, "bytes:standard") == taken  # type: ignore[misc]
    kept = await redis.hmget(KEYS.request("r"), ["entry", "answer", "cached"])  # type: ignore[misc]
    assert kept == [entry_id, b"an answer", b"16"]
    state = await committed(redis)
    assert (await ids(redis), state.worker, state.attempt, state.base) == (IDS[:3], "w1", 1, 3)
    assert not stream.terminal
    await offer(relay, stream)
    assert await redis.xlen(KEYS.requests) == 1


async def test_tokens_that_were_lost_are_committed_again_and_their_run_goes_on(
    redis: Redis, relay: Relay
) -> None:
    await put(redis, 2)
    await offer(relay, await shown(relay, 5))
    assert (await ids(redis), (await committed(redis)).attempt, await resumes(redis)) == (IDS[:5], 1, [])


async def test_a_run_that_began_before_the_shown_tokens_is_void(redis: Redis, relay: Relay) -> None:
    """Its worker made other tokens than the one that the broker forgot."""
    stream = await shown(relay, 5)
    await put(redis, 2, "w2", attempt=2, base=2)
    await redis.xadd(KEYS.log("w2"), {"entry": encode(Events("w", 0, [tokens(2, 4, 2)]))})
    await publish(relay, 1, tokens(2, 3, 2), source="w2")
    await publish(relay, 2, tokens(3, 6, 2), source="w2")
    await wait_until(lambda: relay.filler.offers.num_offers)
    state = await committed(redis)
    assert (await ids(redis), state.worker, state.attempt, state.base) == (IDS[:5], "", 3, 5)
    assert await resumes(redis) == ["r"]
    await publish(relay, 3, tokens(5, 7, 2), source="w2")
    assert stream.ids == IDS[:5]
    await publish(relay, 1, tokens(5, 7, 3), source="w3")
    assert stream.ids == [*IDS[:5], IDS[5] + 2, IDS[6] + 2]


async def test_a_placement_that_was_lost_is_named_again(redis: Redis, relay: Relay) -> None:
    await put(redis, 2, "w0", attempt=1)
    await offer(relay, await shown(relay, 0))
    assert (await committed(redis)).worker == "w0"
    relay.filler.offers.num_offers = 0
    stream = relay.streams["r"]
    stream.add_event(tokens(0, 5), "w0")
    stream.lineage.note("w2", 2)
    await offer(relay, stream)
    state = await committed(redis)
    assert (state.worker, state.attempt, await resumes(redis)) == ("w2", 2, [])


async def test_a_result_with_other_tokens_is_withdrawn(redis: Redis, relay: Relay) -> None:
    stream = await shown(relay, 3)
    await put(redis, 0, "w2", attempt=2)
    other = [token_id + 1 for token_id in IDS[:2]]
    records = pack_columns(other, [0.0, 0.0], [])
    await run_script(
        redis,
        batcher_scripts.finish(
            KEYS, Terminal("r", "length", 2), records=records, kept_ms=60_000, channel="", payload=b""
        ),
    )
    await publish(relay, 2, end(2))
    await wait_until(lambda: relay.filler.offers.num_offers)
    state = await committed(redis)
    assert (state.terminal, state.num_final, state.worker) == ("", 0, "")
    assert (await ids(redis), await redis.xlen(KEYS.requests)) == (IDS[:3], 1)
    assert not stream.terminal and not stream.has_gap


async def test_tokens_of_a_former_reader_give_way(redis: Redis, relay: Relay) -> None:
    """The newest one was shown other tokens, after the broker lost those."""
    stream = await shown(relay, 3)
    await put(redis, 0, "w2", attempt=2)
    await redis.hset(KEYS.request("r"), "reader", "1")  # type: ignore[misc]
    await redis.set(KEYS.tokens("r"), pack_tokens(tokens(0, 2, attempt=2)))
    before = await committed(redis)
    await offer(relay, stream)
    assert (await committed(redis), await resumes(redis)) == (before, [])
    assert stream.terminal and stream.terminal.error_type == "superseded"


async def test_all_streams_are_offered_to_another_server(redis: Redis, relay: Relay) -> None:
    stream = await shown(relay, 3)
    await wait_until(lambda: relay.filler.offers.server_id)
    relay.filler.offers.server_id = "the one before"
    await redis.client_kill_filter(_type="pubsub")
    await wait_until(lambda: relay.filler.offers.num_offers)
    assert await ids(redis) == IDS[:3] and not stream.terminal


async def test_log_probabilities_of_the_likeliest_tokens_are_offered(redis: Redis, relay: Relay) -> None:
    stream = new_stream(top_n_tokens=2)
    relay.add(stream)
    relay.note_admitted(stream)
    stream.append([5, 6], [-0.5, -1.0], ["a", "b"], [[(5, -0.5), (7, -2.0)], [(6, -1.0), (8, -3.0)]])
    await offer(relay, stream)
    assert unpack_records((await committed(redis)).records, 3) == ([5, 6], [-0.5, -1.0], stream.tops)


@pytest.mark.parametrize("ends", ["terminal", "released"])
async def test_a_request_that_ends_while_it_is_offered_is_cancelled(
    redis: Redis, relay: Relay, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The offer has queued it again, and nobody waits for it."""
    stream = await shown(relay, 3)
    send = relay.filler.offers.send

    async def send_and_end(*args: Any) -> OfferReply:
        answer = await send(*args)
        if ends == "released":
            stream.released = True
        else:
            stream.end(end(3))
        return answer

    monkeypatch.setattr(relay.filler.offers, "send", send_and_end)
    relay.filler.offers.request_offer([stream])
    [(_, fields)] = await wait_until(lambda: redis.xrange(KEYS.control))
    assert decode(Cancel, fields[b"cancel"]).request_id == "r"
    assert (await committed(redis)).cancelled
