"""The scripts of jobs and their records, each alone, against the real broker."""

from typing import Any

import pytest
from redis.asyncio import Redis

from api.jobs import records
from api.jobs.records import (
    DEAD,
    DONE,
    FRAMES_LOST,
    JobEnding,
    note_job,
)
from common.broker.keys import RESULT_TTL_MS, Keys
from common.broker.lua import run_script
from tests.support.broker.listening import listening

# --- job scripts --------------------------------------------------------------------------------------------

KEYS = Keys("default")
JOB, STREAM, RESULT = KEYS.job("a"), KEYS.reply("a"), KEYS.result("a")
CHANNEL = KEYS.channel("ext:me")


async def cancel_job(redis: Redis, tenant: str = "") -> int:
    return await run_script(redis, records.mark_cancelled(KEYS, "a", tenant=tenant))


async def reply(
    redis: Redis,
    *frames: tuple[int, int, str],
    channel: str = CHANNEL,
    max_entries: int = 9,
    answer: bytes = b"",
    num_heard: int = 0,
) -> int:
    call = records.write_reply(
        KEYS,
        "a",
        channel=channel,
        max_entries=max_entries,
        answer=answer,
        request_ids=["a#0"],
        frames=[(lane, index, text.encode()) for lane, index, text in frames],
        num_heard=num_heard,
    )
    return await run_script(redis, call)


async def stream_entries(redis: Redis) -> list[tuple[bytes, bytes]]:
    return [(entry_id, fields[b"frame"]) for entry_id, fields in await redis.xrange(STREAM)]


async def test_reply_refuses_frames_beyond_lost_ones_and_takes_all_again(redis: Redis) -> None:
    frames = [(0, 0, "a"), (1, 0, "A"), (0, 1, "b"), (1, 1, "B")]
    await reply(redis, *frames[:2])
    async with listening(redis, CHANNEL) as published:
        assert await reply(redis, frames[3], (1, 2, "C"), answer=b"whole") == 2
        assert await reply(redis, (0, 2, "c"), answer=b"whole") == FRAMES_LOST
        assert await reply(redis, (0, 5, "f"), channel="") == FRAMES_LOST
        assert await reply(redis, *frames, (1, 2, "C"), (0, 2, "c"), num_heard=5) == 2
        assert await published() == [b"B", b"C", b"c"]
    assert [frame for _, frame in await stream_entries(redis)] == [b"a", b"A", b"B", b"C", b"b", b"c"]


@pytest.mark.parametrize(
    ("known", "answer", "ttl_ms"),
    [
        ({}, 0, records.REQUEST_TTL_MS),
        ({"digest": "d"}, 0, -1),
        ({"digest": "d", "choices": 2}, 2, -1),
        ({"last": "x"}, -1, -1),
    ],
)
async def test_cancel_job_marks_jobs_that_have_not_ended(
    redis: Redis, known: dict[str, Any], answer: int, ttl_ms: int
) -> None:
    if known:
        await redis.hset(JOB, mapping=known)  # type: ignore[misc]
    assert await cancel_job(redis) == answer
    assert await redis.hexists(JOB, "cancel") == (answer >= 0)  # type: ignore[misc]
    assert await redis.pttl(JOB) == ttl_ms if ttl_ms < 0 else 0 < await redis.pttl(JOB) <= ttl_ms


# --- job records --------------------------------------------------------------------------------------------

GROUP = "g"
BROKEN = JobEnding(DEAD, 424, "generation", "it broke")


async def submit(redis: Redis, **fields: str) -> str:
    return (await redis.xadd(KEYS.submit, fields or {"job": "{}"})).decode()  # type: ignore[no-any-return, arg-type]


async def note(
    redis: Redis, job_id: str, not_before_ms: int = 0, address: str = "", max_scheduled: int = 9, **entry: str
) -> str:
    """Submit a job, and note it."""
    entry_id = await submit(redis, **entry)
    await redis.hset(KEYS.job(job_id), "digest", "d")  # type: ignore[misc]
    call = note_job(
        KEYS,
        job_id,
        entry_id,
        {"first_entry": entry_id, "not_before_ms": not_before_ms},
        address=address,
        not_before_ms=not_before_ms,
        group=GROUP,
        max_scheduled=max_scheduled,
    )
    return await run_script(redis, call)


async def end(redis: Redis, job_id: str, ending: JobEnding = BROKEN) -> None:
    call = records.write_reply(
        KEYS,
        job_id,
        channel="",
        max_entries=0,
        answer=b"{}",
        request_ids=[],
        frames=[],
        num_heard=0,
        ending=ending,
    )
    await run_script(redis, call)


async def members(redis: Redis, name: str) -> list[bytes]:
    return await redis.zrange(KEYS.job_set(name), 0, -1)  # type: ignore[no-any-return]


async def test_of_too_many_dead_jobs_the_oldest_leave_with_all_that_is_kept(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_DEAD", 2)
    for name in "abc":
        await note(redis, name)
        await end(redis, name)
    assert await members(redis, DEAD) == [b"b", b"c"]
    assert await redis.exists(KEYS.job_record("a"), KEYS.job_entries("a")) == 0
    await redis.zadd(KEYS.job_set(DEAD), {"b": 1})
    await note(redis, "d")
    await end(redis, "d")
    assert await members(redis, DEAD) == [b"c", b"d"]


async def test_a_done_job_is_remembered_without_its_entry(redis: Redis) -> None:
    await note(redis, "a", address="ext:me")
    await end(redis, "a", JobEnding(DONE, 200))
    assert await redis.exists(KEYS.job_entries("a")) == 0
    assert 0 < await redis.pttl(KEYS.job_record("a")) <= RESULT_TTL_MS
    await end(redis, "never-noted")
    assert await redis.exists(KEYS.job_record("never-noted")) == 0
