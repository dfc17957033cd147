"""The scripts of the records of jobs, each alone, against the real broker."""

import time
from typing import Any

from redis.asyncio import Redis

from api.jobs import scripts as job_scripts
from api.jobs.scripts import (
    DEAD,
    DONE,
    LIVE,
    MAX_ADDRESSES,
    SCHEDULED,
    JobEnding,
    note_job,
    note_waiting,
    release_jobs,
    retry_job,
)
from common.broker.keys import JOB_TTL_MS, RESULT_TTL_MS, Keys, request_keys
from common.broker.lua import run_script

KEYS = Keys("default")
GROUP = "g"
DAY_MS = 86_400_000
BROKEN = JobEnding(DEAD, 424, "generation", "it broke")


def later(ms: int = DAY_MS) -> int:
    return int(1000 * time.time()) + ms


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


async def end(redis: Redis, job_id: str, ending: JobEnding = BROKEN, max_dead: int = 9) -> None:
    call = job_scripts.reply(
        KEYS,
        job_id,
        channel="",
        max_entries=0,
        request_ttl_ms=1,
        answer=b"{}",
        request_ids=[],
        frames=[],
        num_heard=0,
        ending=ending,
        dead_ttl_ms=DAY_MS,
        max_dead=max_dead,
    )
    await run_script(redis, call)


async def release(redis: Redis, submit_limit: int = 1000) -> int:
    return await run_script(redis, release_jobs(KEYS, submit_limit=submit_limit))


async def make_due(redis: Redis, *job_ids: str) -> None:
    await redis.zadd(KEYS.job_set(SCHEDULED), dict.fromkeys(job_ids, 1))


async def members(redis: Redis, name: str) -> list[bytes]:
    return await redis.zrange(KEYS.job_set(name), 0, -1)  # type: ignore[no-any-return]


async def entries(redis: Redis) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in await redis.xrange(KEYS.submit)]


async def test_a_scheduled_job_is_in_one_place_and_comes_back_as_it_was(redis: Redis) -> None:
    sent = {"job": "\x00{}", "api_key": "secret", "extra": "x"}
    assert await note(redis, "a", later(), "", 9, **sent) == "scheduled"
    assert await entries(redis) == []
    assert await release(redis) == 0
    assert await redis.pttl(KEYS.job("a")) > JOB_TTL_MS
    await make_due(redis, "a")
    assert [await release(redis), await release(redis)] == [1, 0]
    [fields] = await entries(redis)
    first_entry = fields.pop(b"first_entry").decode()
    assert fields == {name.encode(): value.encode() for name, value in sent.items()}
    assert first_entry == (await redis.hget(KEYS.job_record("a"), "first_entry")).decode()  # type: ignore[misc]
    assert (await members(redis, LIVE), await members(redis, SCHEDULED)) == ([b"a"], [])


async def test_jobs_are_released_while_there_is_room_for_them(redis: Redis) -> None:
    for name in "abc":
        await note(redis, name, later())
    await make_due(redis, *"abc")
    await submit(redis)
    assert [await release(redis, 3), await release(redis, 3)] == [2, 0]


async def test_an_entry_that_comes_when_the_time_has_come_brings_those_that_wait(redis: Redis) -> None:
    await note(redis, "a", later(), "one", job="1")
    assert await note(redis, "a", 1, "two", job="2") == "live"
    assert sorted(fields[b"job"] for fields in await entries(redis)) == [b"1", b"2"]
    assert await members(redis, SCHEDULED) == []


async def test_too_many_scheduled_jobs_are_refused_and_not_known_afterwards(redis: Redis) -> None:
    assert [await note(redis, name, later(), max_scheduled=1) for name in "aab"] == [
        "scheduled",
        "scheduled",
        "full",
    ]
    assert await redis.exists(KEYS.job("b")) == 0
    for i in range(MAX_ADDRESSES):
        answer = await note(redis, "a", later(), f"ext:{i}")
    assert answer == "full" and await redis.exists(KEYS.job("a")) == 1


async def test_a_cancelled_job_is_not_scheduled(redis: Redis) -> None:
    await redis.hset(KEYS.job("a"), "cancel", "1")  # type: ignore[misc]
    assert await note(redis, "a", later()) == "live"


async def test_a_dead_job_is_tried_again_as_if_it_were_new(redis: Redis) -> None:
    await note(redis, "a", job="{}", first_entry="1-0")
    await end(redis, "a")
    await redis.xtrim(KEYS.submit, 0)
    request_key = KEYS.request("a#0")
    await redis.set(request_key, "old")
    record: dict[bytes, bytes] = await redis.hgetall(KEYS.job_record("a"))  # type: ignore[misc]
    assert (record[b"state"], record[b"status"], record[b"reason"]) == (b"dead", b"424", b"generation")
    assert (await members(redis, DEAD), await members(redis, LIVE)) == ([b"a"], [])
    call = retry_job(KEYS, "a", request_keys(KEYS, ["a#0"]))
    assert [await run_script(redis, call), await run_script(redis, call)] == [True, False]
    assert await redis.exists(KEYS.job("a"), KEYS.result("a"), request_key) == 0
    assert await entries(redis) == [{b"job": b"{}"}]
    assert (await members(redis, DEAD), await members(redis, LIVE)) == ([], [b"a"])


async def test_of_too_many_dead_jobs_the_oldest_leave_with_all_that_is_kept(redis: Redis) -> None:
    for name in "abc":
        await note(redis, name)
        await end(redis, name, max_dead=2)
    assert await members(redis, DEAD) == [b"b", b"c"]
    assert await redis.exists(KEYS.job_record("a"), KEYS.job_entries("a")) == 0
    await redis.zadd(KEYS.job_set(DEAD), {"b": 1})
    await note(redis, "d")
    await end(redis, "d", max_dead=9)
    assert await members(redis, DEAD) == [b"c", b"d"]


async def test_a_done_job_is_remembered_without_its_entry(redis: Redis) -> None:
    await note(redis, "a", address="ext:me")
    await end(redis, "a", JobEnding(DONE, 200))
    assert await redis.exists(KEYS.job_entries("a")) == 0
    assert 0 < await redis.pttl(KEYS.job_record("a")) <= RESULT_TTL_MS
    await end(redis, "never-noted")
    assert await redis.exists(KEYS.job_record("never-noted")) == 0


async def test_a_job_that_waits_is_noted_once_and_its_cancel_waits_as_long(redis: Redis) -> None:
    async def wait(job_id: str, entry_id: str) -> Any:
        return await run_script(redis, note_waiting(KEYS, job_id, entry_id, {"kind": "chat"}, address=""))

    assert [await wait("a", "1-0"), await wait("a", "2-0")] == [True, False]
    assert await redis.hgetall(KEYS.job_entries("a")) == {b"": b"1-0"}  # type: ignore[misc]
    await run_script(redis, job_scripts.cancel_job(KEYS, "a", tenant="", mark_ttl_ms=1))
    assert await redis.pttl(KEYS.job("a")) > DAY_MS
    await end(redis, "ended")
    assert await wait("ended", "1-0") is False
