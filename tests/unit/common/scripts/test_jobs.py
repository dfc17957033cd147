"""The scripts of jobs and their records, each alone, against the real broker."""

import time
from typing import Any

import pytest
from redis.asyncio import Redis

from api.jobs import scripts as job_scripts
from api.jobs.scripts import (
    DEAD,
    DONE,
    FRAMES_LOST,
    LIVE,
    MAX_ADDRESSES,
    NOT_A_JOB,
    SCHEDULED,
    JobEnding,
    note_job,
    note_waiting,
    release_jobs,
    retry_job,
)
from common.broker.keys import JOB_TTL_MS, RESULT_TTL_MS, Keys, request_keys
from common.broker.lua import run_script
from tests.support.broker.listening import listening

# --- job scripts --------------------------------------------------------------------------------------------

KEYS = Keys("default")
JOB, STREAM, RESULT = KEYS.job("a"), KEYS.reply("a"), KEYS.result("a")
CHANNEL = KEYS.channel("ext:me")
REQUEST_MS = 500_000
"""How long the request of an answer is kept."""


async def register_job(
    redis: Redis, digest: str = "d", channel: str = "", in_stream: bool = False, tenant: str = ""
) -> str:
    call = job_scripts.register_job(
        KEYS, "a", digest=digest, tenant=tenant, webhook=b"", channel=channel, in_stream=in_stream
    )
    return await run_script(redis, call)


async def cancel_job(redis: Redis, tenant: str = "") -> int:
    return await run_script(redis, job_scripts.cancel_job(KEYS, "a", tenant=tenant, mark_ttl_ms=REQUEST_MS))


async def reply(
    redis: Redis,
    *frames: tuple[int, int, str],
    channel: str = CHANNEL,
    max_entries: int = 9,
    answer: bytes = b"",
    num_heard: int = 0,
) -> int:
    call = job_scripts.reply(
        KEYS,
        "a",
        channel=channel,
        max_entries=max_entries,
        request_ttl_ms=REQUEST_MS,
        answer=answer,
        request_ids=["a#0"],
        frames=[(lane, index, text.encode()) for lane, index, text in frames],
        num_heard=num_heard,
        dead_ttl_ms=REQUEST_MS,
        max_dead=1,
    )
    return await run_script(redis, call)


async def stream_entries(redis: Redis) -> list[tuple[bytes, bytes]]:
    return [(entry_id, fields[b"frame"]) for entry_id, fields in await redis.xrange(STREAM)]


async def test_register_job_recognises_a_repeated_job(redis: Redis) -> None:
    assert [await register_job(redis), await register_job(redis), await register_job(redis, "other")] == [
        "live",
        "live",
        "conflict",
    ]
    assert RESULT_TTL_MS < await redis.pttl(JOB) <= JOB_TTL_MS
    await reply(redis, (0, 0, "last"), answer=b"whole")
    async with listening(redis, CHANNEL) as published:
        await redis.delete(STREAM)
        assert await register_job(redis, channel=CHANNEL, in_stream=True) == "ended"
        assert await register_job(redis, "other", CHANNEL, True) == "conflict"
        assert await published() == [b"last"]
    assert await stream_entries(redis) == [(b"1-0", b"last")]
    await redis.delete(JOB)
    await redis.set(JOB, "mine")
    assert await register_job(redis) == "spoiled"
    assert await reply(redis, (0, 0, "a"), answer=b"b") == NOT_A_JOB


async def test_reply_sends_each_frame_once_and_in_order(redis: Redis) -> None:
    assert await reply(redis, (0, 0, "a"), (1, 0, "A"), (0, 1, "b")) == 3
    assert await reply(redis, (0, 0, "a"), (0, 1, "b"), (0, 2, "c"), (1, 0, "A")) == 1
    assert await stream_entries(redis) == [(b"1-0", b"a"), (b"2-0", b"A"), (b"3-0", b"b"), (b"4-0", b"c")]
    assert await reply(redis, (0, 0, "a"), channel=KEYS.channel("ext:other"), max_entries=0) == 1
    assert RESULT_TTL_MS < await redis.pttl(JOB) <= JOB_TTL_MS


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


async def test_reply_stores_one_answer(redis: Redis) -> None:
    await redis.hset(KEYS.request("a#0"), "digest", "d")  # type: ignore[misc]
    await redis.rpush(RESULT, "mine")  # type: ignore[misc]
    await reply(redis, (0, 0, "a"), answer=b"first")
    await reply(redis, (0, 1, "b"), answer=b"second")
    assert await redis.get(RESULT) == b"first"
    assert await redis.hget(JOB, "last") == b"a"  # type: ignore[misc]
    assert 0 < await redis.pttl(KEYS.request("a#0")) <= REQUEST_MS < await redis.pttl(RESULT) <= RESULT_TTL_MS
    assert await redis.pttl(JOB) <= RESULT_TTL_MS


async def test_reply_stores_the_answer_though_the_stream_key_has_another_type(redis: Redis) -> None:
    await redis.set(STREAM, "mine")
    assert await reply(redis, (0, 0, "a"), answer=b"whole") == 1
    assert await redis.get(RESULT) == b"whole"


async def test_the_reply_stream_is_trimmed(redis: Redis) -> None:
    await reply(redis, *((0, i, str(i)) for i in range(9)), max_entries=3)
    assert [frame for _, frame in await stream_entries(redis)] == [b"6", b"7", b"8"]


@pytest.mark.parametrize(
    ("known", "answer", "ttl_ms"),
    [
        ({}, 0, REQUEST_MS),
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


async def test_a_tenant_cancels_no_job_of_another(redis: Redis) -> None:
    await register_job(redis, tenant="acme")
    assert (await cancel_job(redis, "other"), await redis.hexists(JOB, "cancel")) == (-1, False)  # type: ignore[misc]
    assert await cancel_job(redis, "acme") == 0
    await redis.delete(JOB)
    assert await cancel_job(redis, "other") == 0  # before the job has come
    assert await register_job(redis, tenant="acme") == "live"
    assert not await redis.hexists(JOB, "cancel")  # type: ignore[misc]


async def test_claim_jobs_takes_from_dead_gateways_only(redis: Redis) -> None:
    async def claim_jobs() -> list[str]:
        call = job_scripts.claim_jobs(KEYS, group="gateways", dead=b"g0", claimer="g1", max_jobs=2)
        return await run_script(redis, call)

    await redis.xgroup_create(KEYS.submit, "gateways", id="0", mkstream=True)
    ids = [(await redis.xadd(KEYS.submit, {"job": str(i)})).decode() for i in range(3)]
    await redis.xreadgroup("gateways", "g0", {KEYS.submit: ">"})
    await redis.hset(KEYS.gateway("g0"), "streams", "1")  # type: ignore[misc]
    assert await claim_jobs() == []
    await redis.hset(KEYS.gateway("g0"), "state", "died")  # type: ignore[misc]
    assert await claim_jobs() == ids[:2]
    await redis.delete(KEYS.gateway("g0"))
    assert [await claim_jobs(), await claim_jobs()] == [ids[2:], []]
    assert [
        (one["name"], one["pending"]) for one in await redis.xinfo_consumers(KEYS.submit, "gateways")
    ] == [(b"g1", 3)]


# --- job records --------------------------------------------------------------------------------------------

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
