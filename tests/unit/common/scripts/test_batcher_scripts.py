"""Lua scripts of the batcher: the lease, plans, and what is committed of requests."""

from typing import Any

from redis.asyncio import Redis

from common.broker import batcher_scripts, request_scripts
from common.broker.batcher_scripts import LeaseReply, PlanReply, SavedRequest
from common.broker.client import read_server_id
from common.broker.lua import run_script
from tests.support.scripts import (
    KEYS,
    admit,
    cancel,
    create_logs,
    publish_plan,
    save,
    seal,
)


async def test_publish_plan_writes_plan_and_requests_together(redis: Redis) -> None:
    await admit(redis, "r1")
    await create_logs(redis)
    assert await publish_plan(redis, "5-1", [("r1", 1, 0)]) == PlanReply("OK")
    assert await redis.hmget(KEYS.request("r1"), ["worker", "attempt", "base"]) == [b"w1", b"1", b"0"]  # type: ignore[misc]
    assert await publish_plan(redis, "5-1", [("r1", 1, 0)]) == PlanReply("OK"), "a repeated write is harmless"
    assert await redis.xlen(KEYS.plans("w1")) == 1


async def test_the_run_that_makes_the_first_token_says_how_much_of_the_prompt_was_cached(
    redis: Redis,
) -> None:
    """Another that began before there was a token takes its place; one behind a token does not."""
    await admit(redis, "r1")
    await create_logs(redis)
    for number, (attempt, base, cached) in enumerate([(1, 0, b"16"), (2, 0, b"32"), (3, 1, b"32")], 1):
        await publish_plan(redis, f"5-{number}", [("r1", attempt, base)])
        assert await redis.hget(KEYS.request("r1"), "cached") == cached  # type: ignore[misc]


async def test_an_older_epoch_is_fenced(redis: Redis) -> None:
    await create_logs(redis)
    await publish_plan(redis, "6-1")
    assert (await publish_plan(redis, "5-9")).status == "FENCED"
    assert await redis.xlen(KEYS.plans("w1")) == 1


async def test_publish_plan_with_cancelled_rows_writes_nothing(redis: Redis) -> None:
    for name in ("r1", "r2"):
        await admit(redis, name)
    await create_logs(redis)
    await cancel(redis, "r2")
    rows = [("r1", 1, 0), ("r2", 1, 0), ("gone", 1, 0)]
    assert await publish_plan(redis, "5-1", rows) == PlanReply("refused", [1, 2])
    assert await redis.exists(KEYS.plans("w1")) == 0
    assert await redis.hget(KEYS.request("r1"), "worker") is None  # type: ignore[misc]


async def test_publish_plan_to_a_sealed_or_missing_worker_is_refused(redis: Redis) -> None:
    assert await publish_plan(redis, "5-1") == PlanReply("MISSING")
    await create_logs(redis)
    await seal(redis)
    assert await publish_plan(redis, "5-1") == PlanReply("SEALED")


async def test_an_earlier_epoch_publishes_and_saves_nothing(redis: Redis) -> None:
    await create_logs(redis)
    await admit(redis, "r1")
    await redis.set(KEYS.epoch, 6)
    assert (await publish_plan(redis, "5-1", [("r1", 1, 0)])).status == "FENCED"
    assert await save(redis, SavedRequest("r1", "w1", 1, 1, 0, b"x" * 8)) == "FENCED"
    assert await redis.exists(KEYS.plans("w1"), KEYS.tokens("r1")) == 0
    assert (await publish_plan(redis, "6-1", [("r1", 1, 0)])).status == "OK"


async def test_saving_leaves_the_holder_of_a_request_that_went_on_elsewhere(redis: Redis) -> None:
    await create_logs(redis)
    await admit(redis, "r1")
    await publish_plan(redis, "5-1", [("r1", 2, 0)])
    assert await save(redis, SavedRequest("r1", "w0", 2, 1, 0, b"x" * 8)) == "OK"
    assert await redis.hmget(KEYS.request("r1"), ["worker", "crash_count"]) == [b"w1", b"0"]  # type: ignore[misc]
    assert await redis.get(KEYS.tokens("r1")) == b"x" * 8


async def test_saving_leaves_a_request_that_has_another_attempt_than_was_read(redis: Redis) -> None:
    """A gateway has offered meanwhile what it showed, which ends where the string does that was read."""
    await create_logs(redis)
    await admit(redis, "r1")
    await publish_plan(redis, "5-1", [("r1", 2, 0)])
    await redis.set(KEYS.tokens("r1"), b"y" * 8)
    assert await save(redis, SavedRequest("r1", "w1", 1, 1, 8, b"x" * 8)) == "OK"
    assert await redis.get(KEYS.tokens("r1")) == b"y" * 8
    assert await redis.hget(KEYS.request("r1"), "worker") == b"w1"  # type: ignore[misc]


async def test_a_request_of_another_type_is_read_as_absent(redis: Redis) -> None:
    await admit(redis, "r1", width=3)
    await redis.set(KEYS.tokens("r1"), b"x" * 8)
    await redis.set(KEYS.request("r2"), "x")
    await redis.lpush(KEYS.tokens("r2"), "x")  # type: ignore[misc]

    async def read(offsets: dict[str, int | None], *fields: str, of_ended: bool = False) -> Any:
        call = request_scripts.read_requests(KEYS, offsets, fields=fields, of_ended=of_ended)
        return await run_script(redis, call)

    assert await read({"r1": 0, "r2": 0, "r3": 0}, "digest", "width") == [
        ([b"d", b"3"], b"x" * 8),
        ([None, None], b""),
        ([None, None], b""),
    ]
    assert await read({"r1": None}, "digest") == [([b"d"], b"")]
    assert await read({"r1": 6}, "digest", of_ended=True) == [([b"d"], b"xx")]


async def test_one_holder_has_the_lease_and_epochs_rise(redis: Redis) -> None:

    async def lease(holder: str, own_epoch: str = "", clock_ms: int | bytes = b"") -> LeaseReply:
        call = batcher_scripts.lease(KEYS, holder=holder, ttl_ms=5000, own_epoch=own_epoch, clock_ms=clock_ms)
        return await run_script(redis, call)

    first, server_id = await lease("b0")
    assert server_id == await read_server_id(redis)
    assert first and await lease("b1") == LeaseReply("", server_id)
    await redis.delete(KEYS.batcher)
    assert await lease("b0", first, 7000) == LeaseReply(first, server_id), "a lease that only expired is kept"
    await redis.delete(KEYS.batcher)
    second, _ = await lease("b1")
    assert int(second) > int(first)
    assert await lease("b0", first, 7000) == LeaseReply("", server_id)
    await redis.set(KEYS.epoch, 2**52)
    await redis.delete(KEYS.batcher)
    latest, _ = await lease("b0")
    assert int(latest) == 2**52 + 1


async def test_a_foreign_entry_is_not_taken_for_the_plan(redis: Redis) -> None:
    """A plan of a later epoch is published behind it."""
    await create_logs(redis)
    assert await publish_plan(redis, "5-1") == PlanReply("OK")
    await redis.xadd(KEYS.plans("w1"), {"a": "foreign"}, id="5-2")
    assert (await publish_plan(redis, "5-2")).status == "FENCED"
    assert await publish_plan(redis, "6-1") == PlanReply("OK")


async def test_a_plan_is_written_behind_the_one_before_it_only(redis: Redis) -> None:
    await create_logs(redis)
    assert await publish_plan(redis, "5-1") == PlanReply("OK")
    assert await publish_plan(redis, "5-3") == PlanReply("GAP")
    assert await publish_plan(redis, "6-2") == PlanReply("GAP"), "nothing of its epoch is written"
    assert await redis.xlen(KEYS.plans("w1")) == 1
    for number in (2, 3, 2):
        assert await publish_plan(redis, f"5-{number}") == PlanReply("OK"), "a repeated write is harmless"
    assert [entry_id for entry_id, _ in await redis.xrange(KEYS.plans("w1"))] == [b"5-1", b"5-2", b"5-3"]
