"""The scripts of jobs and their records, each alone, against the real broker."""

import pytest
from redis.asyncio import Redis

from api.jobs import records
from api.jobs.records import (
    DEAD,
    DONE,
    JobEnding,
    note_job,
)
from common.broker.keys import RESULT_TTL_MS, Keys
from common.broker.lua import run_script

KEYS = Keys("default")
JOB, STREAM, RESULT = KEYS.job("a"), KEYS.reply("a"), KEYS.result("a")

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
