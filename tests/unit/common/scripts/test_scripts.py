"""Scripts of requests, workers and the lease, one by one, against a real broker."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from common.broker import batcher_scripts, worker_scripts
from common.broker.batcher_scripts import SavedRequest
from common.broker.committed import read
from common.broker.keys import SEALED
from common.broker.lua import run_script
from common.broker.pool_client import PoolClient
from common.broker.request_scripts import AdmitReply
from common.broker.worker_scripts import FlushedPrompt, FlushedTerminal
from common.messages.codec import encode
from common.messages.events import Events, Terminal, Tokens, pack_tokens
from common.messages.records import RECORD, pack_floats, pack_ids, unpack_records
from tests.support.broker.listening import Published, listening
from tests.support.scripts import (
    KEYS,
    admit,
    cancel,
    create_logs,
    dequeue,
    entry,
    flush,
    flushed_end,
    publish_plan,
    save,
    seal,
)

ANSWER = RECORD.pack(7, -1.0)
"""What is kept of an answer of one token."""


def length_end(channel: str = "", payload: bytes = b"") -> FlushedTerminal:
    return flushed_end(Terminal("r1", "length", 1), ANSWER, channel, payload)


async def taken(redis: Redis) -> tuple[int, int]:
    """Requests of the class `standard`, and their bytes."""
    count, size = await redis.hmget(KEYS.places, ["requests:standard", "bytes:standard"])  # type: ignore[misc]
    return int(count), int(size)


@pytest.fixture
async def published(redis: Redis) -> AsyncIterator[Published]:
    async with listening(redis, "ch", "other") as heard:
        yield heard


async def test_admission_counts_bytes_and_entries(redis: Redis) -> None:
    assert (await admit(redis, "r1")).outcome == "admitted"
    assert (await admit(redis, "r2", b"y" * 89)).outcome == "admitted"
    assert await taken(redis) == (2, 99)
    assert await admit(redis, "r3") == AdmitReply("requests", num_counted=2, wait_ms=1000)
    assert await redis.exists(KEYS.request("r3")) == 0
    assert await admit(redis, "r3", max_count=3) == AdmitReply("bytes", num_counted=99, wait_ms=1000)


async def test_the_same_id_attaches_or_conflicts(redis: Redis) -> None:
    await admit(redis, "r1")
    assert await admit(redis, "r1") == AdmitReply("attached")
    assert await admit(redis, "r1", digest="other") == AdmitReply("conflict")
    assert await redis.xlen(KEYS.requests) == 1


async def test_dequeue_frees_count_and_bytes_once(redis: Redis) -> None:
    entry_id = (await admit(redis, "r1")).entry_id
    await admit(redis, "r2")
    assert not await dequeue(redis, "r1", entry_id), "it has not ended"
    assert await taken(redis) == (2, 20)
    await redis.hset(KEYS.request("r1"), "terminal", "length")  # type: ignore[misc]
    for _ in range(2):
        assert await dequeue(redis, "r1", entry_id)
    assert await taken(redis) == (1, 10)
    assert (await admit(redis, "r3")).outcome == "admitted"


async def test_a_flush_appends_then_publishes(redis: Redis, published: Published) -> None:
    await create_logs(redis)
    messages = [("ch", b"one"), ("other", b"two")]
    assert await flush(redis, 1, entry("r1", 0, [7]), b"report", messages) == ("OK", [])
    assert await published() == [b"one", b"two"]
    assert [i for i, _ in await redis.xrange(KEYS.reports("w1"))] == [b"0-1", b"1-0"]
    assert await flush(redis, 1, entry("r1", 0, [7]), b"report", messages) == ("OK", []), "a repeated flush"
    assert await flush(redis, 1, entry("r1", 0, [7]), b"report", messages[:1]) == ("SEALED", []), (
        "another one"
    )
    assert await published() == []
    assert await redis.xlen(KEYS.log("w1")) == 2


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


async def test_a_flush_behind_a_lost_one_is_refused_unless_it_is_whole(
    redis: Redis, published: Published
) -> None:
    await create_logs(redis)
    assert await flush(redis, 2, messages=[("ch", b"x")]) == ("GAP", [])
    assert await flush(redis, 1) == ("OK", [])
    assert await flush(redis, 5, messages=[("ch", b"x")], mode="trim") == ("GAP", [])
    assert (await published(), await redis.xlen(KEYS.log("w1"))) == ([], 2)
    assert await flush(redis, 5, messages=[("ch", b"x")], mode="whole") == ("OK", [])
    assert await published() == [b"x"]
    assert [i for i, _ in await redis.xrange(KEYS.log("w1"))] == [b"0-1", b"1-0", b"5-0"]
    assert await flush(redis, 6) == ("OK", [])


async def test_only_the_first_terminal_is_published(redis: Redis, published: Published) -> None:
    await admit(redis, "r1")
    await create_logs(redis)

    async def finish(end: Terminal, payload: bytes) -> bool:
        call = batcher_scripts.finish(KEYS, end, records=b"", ttl_ms=60_000, channel="ch", payload=payload)
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


async def test_committed_tokens_are_those_of_string_and_log(redis: Redis) -> None:
    await create_logs(redis)
    await admit(redis, "r1")
    await publish_plan(redis, "5-1", [("r1", 2, 1)])
    await redis.set(KEYS.tokens("r1"), RECORD.pack(10, -1.0))
    await flush(redis, 1, entry("r1", 1, [11], attempt=2))
    await flush(redis, 2, entry("r1", 1, [11, 12], attempt=2))
    await flush(redis, 3, entry("other", 0, [99]))
    state = (await read(PoolClient(redis, KEYS), ["r1", "unknown"]))["r1"]
    assert unpack_records(state.records)[0] == [10, 11, 12]
    assert (state.spilled_bytes, state.worker, state.attempt, state.base) == (8, "w1", 2, 1)
    saved = SavedRequest("r1", "w1", state.attempt, 1, state.spilled_bytes, state.records[8:])
    for _ in range(2):
        assert await save(redis, saved) == "OK"
    assert await redis.get(KEYS.tokens("r1")) == state.records
    assert await redis.hmget(KEYS.request("r1"), ["worker", "crash_count"]) == [b"", b"1"]  # type: ignore[misc]
    assert not (await read(PoolClient(redis, KEYS), ["unknown"]))["unknown"].known


async def test_heartbeats_are_refused_after_the_seal(redis: Redis) -> None:
    await create_logs(redis)
    call = worker_scripts.worker_heartbeat(
        KEYS, "w1", capacity=b"capacity", ttl_ms=5000, state="ready", step=3, fields={}
    )
    for _ in range(2):
        assert await run_script(redis, call) == "OK"
    assert await redis.xlen(KEYS.control) == 1, "the batcher is notified once"
    assert await redis.zrange(KEYS.workers, 0, -1) == [b"w1"]
    await seal(redis)
    assert await redis.exists(KEYS.worker("w1"), KEYS.workers) == 0
    assert await run_script(redis, call) == "SEALED"
    assert await redis.exists(KEYS.worker("w1"), KEYS.workers) == 0


async def test_likeliest_tokens_are_committed_with_their_token(redis: Redis) -> None:
    await create_logs(redis)
    await admit(redis, "r1", width=3)
    await publish_plan(redis, "5-1", [("r1", 1, 0)])
    tokens = [
        Tokens(
            "r1", 1, i, pack_ids([i]), pack_floats([-1.0]), [], pack_ids([i, 7]), pack_floats([-1.0, -2.0])
        )
        for i in range(3)
    ]
    await redis.set(KEYS.tokens("r1"), pack_tokens(tokens[0]) + b"half of a token")
    await flush(redis, 1, encode(Events("w", 0, tokens[1:])))
    state = (await read(PoolClient(redis, KEYS), ["r1"]))["r1"]
    assert (state.num_tokens, state.spilled_bytes) == (3, 24)
    assert unpack_records(state.records, 3) == (
        [0, 1, 2],
        [-1.0] * 3,
        [[(i, -1.0), (7, -2.0)] for i in range(3)],
    )


@pytest.mark.parametrize("stream", ["log", "reports"])
async def test_a_flush_behind_foreign_entries_is_refused(
    redis: Redis, published: Published, stream: str
) -> None:
    """Such a flush is not taken for a repeated one."""
    await create_logs(redis)
    await redis.xadd(getattr(KEYS, stream)("w1"), {"a": "foreign"})
    assert await flush(redis, 1, entry("r1", 0, [7]), b"report", [("ch", b"one")]) == ("SEALED", [])
    assert await published() == []


async def test_prompt_logprobs_are_committed_with_the_first_token(redis: Redis) -> None:
    """They are in the request's hash. A hash that is gone, or a key of another type, stays as it is."""
    await create_logs(redis)
    await admit(redis, "r1")
    await publish_plan(redis, "5-1", [("r1", 1, 0)])
    assert (await read(PoolClient(redis, KEYS), ["r1"]))["r1"].prompt is None
    await redis.set(KEYS.request("spoiled"), "x")
    prompts = [FlushedPrompt("gone", b"a"), FlushedPrompt("spoiled", b"b"), FlushedPrompt("r1", b"records")]
    assert await flush(redis, 1, entry("r1", 0, [7]), prompts=prompts, terminals=[length_end()]) == ("OK", [])
    state = (await read(PoolClient(redis, KEYS), ["r1"]))["r1"]
    assert (state.prompt, state.terminal) == (b"records", "length")
    assert await redis.exists(KEYS.request("gone")) == 0
    assert await redis.get(KEYS.request("spoiled")) == b"x"
    assert 0 < await redis.pttl(KEYS.request("r1")) <= 60_000


async def test_two_processes_never_share_an_incarnation(redis: Redis) -> None:
    assert await create_logs(redis, owner="first")
    assert await create_logs(redis, owner="first")  # its answer was lost
    assert not await create_logs(redis, owner="second")
    assert await redis.xlen(KEYS.log("w1")) == await redis.xlen(KEYS.reports("w1")) == 1
