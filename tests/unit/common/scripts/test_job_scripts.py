"""The scripts of jobs, each alone, against the real broker."""

from typing import Any

import pytest
from redis.asyncio import Redis

from api.jobs import scripts as job_scripts
from api.jobs.scripts import FRAMES_LOST, NOT_A_JOB
from common.broker.keys import JOB_TTL_MS, RESULT_TTL_MS, Keys
from common.broker.lua import run_script
from tests.support.broker.listening import listening

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
