"""TimelineWriter: events of requests, from the batcher to the gateway that reads them back."""

from typing import Any

import pytest
from redis.asyncio import Redis

from api.admin.routes_timeline import read_timelines
from batcher import timeline
from batcher.scheduling.plan_builder import PendingPlan
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.sequence import Sequence
from batcher.timeline import MAX_UNWRITTEN, REQUESTS_PER_ENTRY, WRITE_INTERVAL_S, TimelineWriter
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.events import Timeline, TimelineEvent
from common.messages.plan import Plan, Report, WorkerCapacity
from common.messages.records import RECORD, pack_ids
from common.messages.request import Generate, StoppingParams
from common.metrics import catalogue

KEYS = Keys("default")
NOW_MS = 1_000_000


def sequence(name: str = "r1", entry_ms: int = NOW_MS) -> Sequence:
    return Sequence(
        Generate(name, "d", pack_ids([1, 2, 3]), StoppingParams(50)), f"{entry_ms}-0", NOW_MS + 60_000
    )


def replica() -> Replica:
    return Replica(WorkerCapacity("w0-1", "w0", "m", "float32", 16, 100, 64, 2048), WorkerLimits())


def make_writer(redis: Redis) -> TimelineWriter:
    return TimelineWriter(PoolClient(redis, KEYS), lambda: NOW_MS)


def happened(writer: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(one["what"], one["worker"], one["attempt"], one["num_tokens"], one["why"]) for one in writer]


async def test_a_timeline_from_queue_to_end(redis: Redis) -> None:
    writer, one, worker = make_writer(redis), sequence(), replica()
    writer.record_queued(one)
    row = worker.start(one)
    writer.record_plan(PendingPlan(worker, Plan(1, 2, 32, 64), [row]))
    writer.record_report(worker, Report(1, 1, 2, 1, prefilled=[(row.number, 3, 1)]))
    one.commit(b"\0" * RECORD.size * 37)
    writer.record_death("w0-1", [one])
    row = worker.start(one)
    before = catalogue.BATCH_CONCAT.values["backpressure",]
    writer.record_plan(PendingPlan(worker, Plan(1, 3, 64, 64), [row], joins="backpressure"))
    assert catalogue.BATCH_CONCAT.values["backpressure",] == before + 1
    writer.record_report(
        worker, Report(2, 1, 3, 40, ended=[(row.number, "preempted", 41), (99, "length", 1)])
    )
    writer.record_report(worker, Report(3, 1, 3, 50, ended=[(row.number, "length", 50)]))
    await writer.write()
    assert happened((await read_timelines(PoolClient(redis, KEYS), "r1"))["r1"]) == [
        ("queued", "", 0, 3, ""),
        ("placed", "w0-1", 1, 0, ""),
        ("prefilled", "w0-1", 1, 1, ""),
        ("died", "w0-1", 1, 37, ""),
        ("placed", "w0-1", 2, 37, ""),
        ("interrupted", "w0-1", 2, 41, "preempted"),
        ("ended", "w0-1", 2, 50, "length"),
    ]
    assert await redis.pttl(KEYS.timeline) > 0


async def test_a_request_that_a_new_batcher_finds_is_queued_or_taken_over(redis: Redis) -> None:
    writer, fresh, placed = make_writer(redis), sequence("fresh"), sequence("placed")
    placed.attempt = 1
    for one in (fresh, placed):
        writer.record_takeover(one)
    await writer.write()
    assert [
        one["what"]
        for name in ("fresh", "placed")
        for one in (await read_timelines(PoolClient(redis, KEYS), name))[name]
    ] == [
        "queued",
        "taken_over",
    ]


async def test_events_are_written_at_an_interval_in_bounded_entries(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "WRITE_INTERVAL_S", 3600.0)
    writer = make_writer(redis)
    writer.written_s -= 3600.0
    for i in range(REQUESTS_PER_ENTRY + 1):
        writer.record_queued(sequence(f"r{i}"))
    await writer.write()
    assert await redis.xlen(KEYS.timeline) == 2
    writer.record_queued(sequence("late"))
    await writer.write()
    assert writer.unwritten and not await read_timelines(PoolClient(redis, KEYS), "late")
    writer.written_s -= 3600.0
    await writer.write()
    assert await read_timelines(PoolClient(redis, KEYS), "late") and not writer.unwritten


async def test_a_key_of_another_type_keeps_events_up_to_a_bound(redis: Redis) -> None:
    await redis.set(KEYS.timeline, "spoilt")
    writer = make_writer(redis)
    writer.record_queued(sequence())
    await writer.write()
    assert writer.unwritten
    for i in range(MAX_UNWRITTEN + 1):
        writer.record_queued(sequence(f"r{i}"))
    writer.written_s -= WRITE_INTERVAL_S
    await writer.write()
    assert not writer.unwritten


async def test_reading_a_request_finds_its_choices(redis: Redis) -> None:
    writer = make_writer(redis)
    for name in ("r1.0", "r1.1", "r10", "r1", "job#0"):
        writer.record_queued(sequence(name))
    await writer.write()
    assert list(await read_timelines(PoolClient(redis, KEYS), "r1")) == ["r1", "r1.0", "r1.1"]
    assert list(await read_timelines(PoolClient(redis, KEYS), "r1.1")) == ["r1.1"]
    assert list(await read_timelines(PoolClient(redis, KEYS), "job")) == ["job#0"]
    assert await read_timelines(PoolClient(redis, KEYS), "r") == {}


async def test_reading_goes_back_as_far_as_needed_and_skips_undecodable_fields(redis: Redis) -> None:
    def entry(name: str, *happenings: TimelineEvent) -> dict[Any, Any]:
        return {name: encode(Timeline(list(happenings)))}

    await redis.xadd(KEYS.timeline, entry("r1", TimelineEvent(1000, "ended")), id="1000-0")
    await redis.xadd(KEYS.timeline, entry("r1", TimelineEvent(20_000, "queued")), id="20000-0")
    await redis.xadd(KEYS.timeline, {"r1": b"garbage", b"\xff": b""}, id="20001-0")
    async with redis.pipeline() as pipe:
        for i in range(1200):
            pipe.xadd(KEYS.timeline, entry("other", TimelineEvent(30_000, "placed")), id=f"30000-{i}")
        await pipe.execute()
    await redis.xadd(KEYS.timeline, entry("r1", TimelineEvent(40_000, "ended")), id="40000-0")
    assert [one["at_ms"] for one in (await read_timelines(PoolClient(redis, KEYS), "r1"))["r1"]] == [
        1000,
        20_000,
        40_000,
    ]
    assert len((await read_timelines(PoolClient(redis, KEYS), "other"))["other"]) == 1200
