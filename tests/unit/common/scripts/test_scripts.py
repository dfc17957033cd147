"""Scripts of requests, workers and the batcher, one by one, against a real broker."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from api.requests import request_scripts
from api.requests.request_scripts import AttachReply
from api.streams.relay import read_tails
from batcher import batcher_scripts
from common.broker.committed import Committed, read
from common.broker.keys import SEALED
from common.broker.lua import run_script
from common.broker.pool_client import PoolClient
from common.messages.events import Terminal, terminal_for
from common.messages.records import RECORD, unpack_records
from gpu_worker.worker_scripts import FlushedTerminal
from tests.support.broker.listening import Published, listening
from tests.support.scripts import (
    KEYS,
    admit,
    cancel,
    create_logs,
    entry,
    flush,
    flushed_end,
    forget,
    publish_plan,
    save,
    seal,
)

# --- scripts ------------------------------------------------------------------------------------------------

ANSWER = RECORD.pack(7, -1.0)
"""What is kept of an answer of one token."""


def length_end(channel: str = "", payload: bytes = b"") -> FlushedTerminal:
    return flushed_end(Terminal("r1", "length", 1), ANSWER, channel, payload)


@pytest.fixture
async def published(redis: Redis) -> AsyncIterator[Published]:
    async with listening(redis, "ch", "other") as heard:
        yield heard


async def test_a_sealed_or_missing_log_refuses_everything(redis: Redis, published: Published) -> None:
    await admit(redis, "r1")
    assert await flush(redis, 1, messages=[("ch", b"x")]) == ("MISSING", [])
    await create_logs(redis)
    await flush(redis, 1)
    assert await seal(redis)
    assert await flush(
        redis,
        2,
        messages=[("ch", b"x")],
        terminals=[length_end("ch", b"end")],
        spills=[("r1", 0, b"12345678")],
    ) == ("SEALED", [])
    assert await published() == []
    assert await redis.exists(KEYS.tokens("r1")) == 0
    assert (await redis.xrange(KEYS.log("w1")))[-1][0] == SEALED.encode()
    assert await seal(redis)
    assert await redis.xlen(KEYS.log("w1")) == 3, "sealed once"


async def test_only_the_first_terminal_is_published(redis: Redis, published: Published) -> None:
    await admit(redis, "r1")
    await create_logs(redis)

    async def finish(end: Terminal, payload: bytes) -> bool:
        call = batcher_scripts.finish(KEYS, end, records=b"", kept_ms=60_000, channel="ch", payload=payload)
        return await run_script(redis, call)

    assert await finish(Terminal("r1", "cancelled", 1, "cancelled: client", "cancelled"), b"cancelled")
    await flush(redis, 1, terminals=[length_end("ch", b"length")])
    assert not await finish(Terminal("r1", "error", 1, "gone", "generation"), b"e")
    assert await published() == [b"cancelled"]
    end = await redis.hmget(KEYS.request("r1"), ["terminal", "num_tokens", "error", "error_type"])  # type: ignore[misc]
    assert end == [b"cancelled", b"1", b"cancelled: client", b"cancelled"]
    assert await redis.exists(KEYS.tokens("r1")) == 0
    assert 0 < await redis.pttl(KEYS.request("r1")) <= 60_000
    assert not await cancel(redis, "r1")


async def test_spills_are_idempotent_and_leave_no_hole(redis: Redis) -> None:
    records = b"".join(RECORD.pack(i, -1.0) for i in range(4))
    await create_logs(redis)
    await admit(redis, "r1")
    await redis.hset(KEYS.request("r1"), "worker", "w1")  # type: ignore[misc]
    await flush(redis, 1, entry("r1", 0, [0, 1]))
    await flush(redis, 2, entry("r1", 2, [2]), spills=[("r1", 0, records[:24])], mode="trim")
    assert [i for i, _ in await redis.xrange(KEYS.log("w1"))] == [b"2-0"], "what is spilled is trimmed"
    await flush(redis, 3, entry("r1", 3, [3]), spills=[("r1", 8, records[8:])])
    assert await redis.get(KEYS.tokens("r1")) == records
    await flush(redis, 4, spills=[("r1", 72, records)], mode="trim")
    assert await redis.get(KEYS.tokens("r1")) == records, "a hole is refused"
    assert await redis.xlen(KEYS.log("w1")) == 3, "and then nothing is trimmed"
    state = (await read(PoolClient(redis, KEYS), ["r1"]))["r1"]
    assert unpack_records(state.records)[0] == [0, 1, 2, 3]


async def test_two_processes_never_share_an_incarnation(redis: Redis) -> None:
    assert await create_logs(redis, owner="first")
    assert await create_logs(redis, owner="first")  # its answer was lost
    assert not await create_logs(redis, owner="second")
    assert await redis.xlen(KEYS.log("w1")) == await redis.xlen(KEYS.reports("w1")) == 1


# --- batcher scripts ----------------------------------------------------------------------------------------


async def test_the_run_that_makes_the_first_token_says_how_much_of_the_prompt_was_cached(
    redis: Redis,
) -> None:
    """Another that began before there was a token takes its place; one behind a token does not."""
    await admit(redis, "r1")
    await create_logs(redis)
    for number, (attempt, base, cached) in enumerate([(1, 0, b"16"), (2, 0, b"32"), (3, 1, b"32")], 1):
        await publish_plan(redis, f"5-{number}", [("r1", attempt, base)])
        assert await redis.hget(KEYS.request("r1"), "cached") == cached  # type: ignore[misc]


async def test_an_earlier_epoch_publishes_and_saves_nothing(redis: Redis) -> None:
    await create_logs(redis)
    await admit(redis, "r1")
    await redis.set(KEYS.epoch, 6)
    assert (await publish_plan(redis, "5-1", [("r1", 1, 0)]))[0] == "FENCED"
    assert await save(redis, "w1", 1, 0, b"x" * 8) == "FENCED"
    assert await redis.exists(KEYS.plans("w1"), KEYS.tokens("r1")) == 0
    assert (await publish_plan(redis, "6-1", [("r1", 1, 0)]))[0] == "OK"


async def test_saving_leaves_the_holder_of_a_request_that_went_on_elsewhere(redis: Redis) -> None:
    await create_logs(redis)
    await admit(redis, "r1")
    await publish_plan(redis, "5-1", [("r1", 2, 0)])
    assert await save(redis, "w0", 2, 0, b"x" * 8) == "OK"
    assert await redis.hmget(KEYS.request("r1"), ["worker", "crash_count"]) == [b"w1", b"0"]  # type: ignore[misc]
    assert await redis.get(KEYS.tokens("r1")) == b"x" * 8


async def test_saving_leaves_a_request_that_has_another_attempt_than_was_read(redis: Redis) -> None:
    """A gateway has offered meanwhile what it showed, which ends where the string does that was read."""
    await create_logs(redis)
    await admit(redis, "r1")
    await publish_plan(redis, "5-1", [("r1", 2, 0)])
    await redis.set(KEYS.tokens("r1"), b"y" * 8)
    assert await save(redis, "w1", 1, 8, b"x" * 8) == "OK"
    assert await redis.get(KEYS.tokens("r1")) == b"y" * 8
    assert await redis.hget(KEYS.request("r1"), "worker") == b"w1"  # type: ignore[misc]


# --- terminal scripts ---------------------------------------------------------------------------------------

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


async def test_a_failure_keeps_its_words_and_no_token(redis: Redis) -> None:
    await end(redis, "timeout", RECORDS[:800])
    state = await read_end(redis)
    assert (state.terminal, state.error_type, state.records) == ("error", "timeout", b"") and state.error
    assert await own_keys(redis) == [KEYS.request("r1").encode()]


# --- reader scripts -----------------------------------------------------------------------------------------


async def attach(redis: Redis, *request_ids: str, gateway: str, inherited: int | None = None) -> AttachReply:
    call = request_scripts.attach(KEYS, request_ids, gateway=gateway, inherited=inherited)
    return await run_script(redis, call)


def attached(reader: int, num_requests: int = 1) -> AttachReply:
    """The reply of requests that `admit` has admitted."""
    return AttachReply("attached", reader, ["d"] * num_requests)


async def test_only_the_newest_reader_cancels_and_forgets(redis: Redis) -> None:
    await admit(redis, "r1")
    await admit(redis, "r2")
    assert await attach(redis, "r1", "r2", gateway="g2") == attached(1, 2)
    for name in ("r1", "r2"):
        assert await redis.hmget(KEYS.request(name), ["reader", "gateway"]) == [b"1", b"g2"]  # type: ignore[misc]
    assert not await cancel(redis, "r1", reader=0)
    assert not await forget(redis, "r1", reader=0)
    assert await forget(redis, "r1", reader=1)
    assert await attach(redis, "r1", "r2", gateway="g3") == AttachReply("gone")
    assert await cancel(redis, "r2", reader=1)
    assert await attach(redis, "r2", gateway="g3") == AttachReply("cancelled")


async def test_a_detached_request_has_no_gateway_whoever_reads(redis: Redis) -> None:
    await admit(redis, "r1")
    await redis.hset(KEYS.request("r1"), "gateway", "")  # type: ignore[misc]
    assert await attach(redis, "r1", gateway="g2") == attached(1)
    assert await redis.hget(KEYS.request("r1"), "gateway") == b""  # type: ignore[misc]


async def test_an_inherited_connection_yields_to_the_one_on_which_its_client_came_back(redis: Redis) -> None:
    """Heirs follow each other on one connection; one whose client has another is superseded."""
    await admit(redis, "r1")
    assert await attach(redis, "r1", gateway="g2", inherited=0) == attached(1)
    assert await attach(redis, "r1", gateway="g3", inherited=0) == attached(2)
    assert await attach(redis, "r1", gateway="g4") == attached(3)
    assert await attach(redis, "r1", gateway="g2", inherited=0) == AttachReply("superseded")
    assert await attach(redis, "r1", gateway="g2", inherited=3) == attached(4)
