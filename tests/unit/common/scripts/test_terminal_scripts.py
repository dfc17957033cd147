"""Ends of requests in Redis: their fields in the request's hash, their tokens in the request's string."""

from typing import Any

from redis.asyncio import Redis

from common.broker.committed import Committed, read, read_saved, read_tails
from common.broker.pool_client import PoolClient
from common.messages.events import terminal_for
from common.messages.records import RECORD
from tests.support.scripts import KEYS, admit, create_logs, dequeue, flush, flushed_end, forget, publish_plan

RECORDS = b"".join(RECORD.pack(token_id, -1.0) for token_id in range(200))
OWN = [KEYS.request("r1"), KEYS.tokens("r1")]


async def end(redis: Redis, why: str, spilled: bytes = b"") -> None:
    """Have a worker end a request of 200 tokens, of which it has spilled some."""
    await create_logs(redis)
    await admit(redis, "r1")
    await publish_plan(redis, "5-1", [("r1", 1, 0)])
    await flush(redis, 1, spills=[("r1", 0, spilled)])
    terminals = [flushed_end(terminal_for("r1", why, 200), RECORDS)]
    assert await flush(redis, 2, terminals=terminals) == ("OK", [])


async def read_end(redis: Redis) -> Committed:
    return (await read_tails(PoolClient(redis, KEYS), {"r1": 0}))["r1"]


async def own_keys(redis: Redis) -> list[bytes]:
    return sorted(await redis.keys(KEYS.key("*r1*")))


async def test_an_answer_is_its_tokens_and_no_second_object(redis: Redis) -> None:
    """Spilled or not: eight bytes a token, and what a string takes besides."""
    for spilled in (b"", RECORDS[:800], RECORDS):
        await redis.flushdb()
        await end(redis, "length", spilled)
        assert await own_keys(redis) == sorted(key.encode() for key in OWN)
        state = await read_end(redis)
        assert (state.terminal, state.num_final, state.error, state.records) == ("length", 200, "", RECORDS)
        assert await redis.memory_usage(KEYS.tokens("r1")) <= len(RECORDS) * 1.25 + 200
        for key in OWN:
            assert 0 < await redis.pttl(key) <= 60_000


async def test_tokens_of_another_run_give_way_to_those_of_the_end(redis: Redis) -> None:
    await end(redis, "length", bytes(800))
    assert (await read_end(redis)).records == RECORDS


async def test_a_failure_keeps_its_words_and_no_token(redis: Redis) -> None:
    await end(redis, "timeout", RECORDS[:800])
    state = await read_end(redis)
    assert (state.terminal, state.error_type, state.records) == ("error", "timeout", b"") and state.error
    assert await own_keys(redis) == [KEYS.request("r1").encode()]


async def test_an_answer_outlives_its_entry_and_goes_with_its_request(redis: Redis) -> None:
    await end(redis, "length")
    entry_id = await redis.hget(KEYS.request("r1"), "entry")  # type: ignore[misc]
    assert await dequeue(redis, "r1", entry_id)
    assert (await read_end(redis)).records == RECORDS
    assert await forget(redis, "r1", reader=0)
    assert await own_keys(redis) == []


async def test_tokens_of_a_request_that_is_gone_go_with_its_entry(redis: Redis) -> None:
    await redis.set(KEYS.tokens("r1"), RECORDS)
    assert await dequeue(redis, "r1", "1-1")
    assert await own_keys(redis) == []


async def test_of_an_ended_request_all_tokens_are_read_or_none(redis: Redis) -> None:
    """A gateway compares them with what it has shown; recovery needs none."""
    await end(redis, "length")
    states: list[Any] = [
        (await read_tails(PoolClient(redis, KEYS), {"r1": 800}))["r1"],
        (await read(PoolClient(redis, KEYS), ["r1"]))["r1"],
        (await read_saved(PoolClient(redis, KEYS), ["r1"]))["r1"],
    ]
    assert [state.records for state in states] == [RECORDS, RECORDS, b""]
