"""Events of requests, from the batcher to the gateway that reads them; spans follow from them."""

from typing import Any

import pytest
from redis.asyncio import Redis

from api.admin.routes_fleet import read_timelines
from batcher.scheduling.plan_builder import PendingPlan
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.sequence import Sequence
from batcher.timeline import TimelineWriter, spans_of
from common import tracing
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.events import Timeline, TimelineEvent
from common.messages.plan import Plan, Report, WorkerCapacity
from common.messages.records import RECORD, pack_ids
from common.messages.request import Generate, StoppingParams
from common.metrics import catalogue
from common.tracing import TraceSpan, ids_of, span_name
from tests.support.broker_state import KEYS

# --- timeline -----------------------------------------------------------------------------------------------

NOW_MS = 1_000_000


def sequence(name: str = "r1", entry_ms: int = NOW_MS) -> Sequence:
    return Sequence(
        Generate(name, "d", pack_ids([1, 2, 3]), StoppingParams(50)), f"{entry_ms}-0", NOW_MS + 60_000
    )


def replica() -> Replica:
    return Replica(WorkerCapacity("w0-1", "w0", "m", "float32", 16, 100, 64, 2048), WorkerLimits())


def make_writer(redis: Redis) -> TimelineWriter:
    return TimelineWriter(PoolClient(redis, KEYS), lambda: NOW_MS)


WHAT_HAPPENED = ("what", "worker", "attempt", "num_tokens", "why")


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
    happened = (await read_timelines(PoolClient(redis, KEYS), "r1"))["r1"]
    assert [tuple(one[name] for name in WHAT_HAPPENED) for one in happened] == [
        ("queued", "", 0, 3, ""),
        ("placed", "w0-1", 1, 0, ""),
        ("prefilled", "w0-1", 1, 1, ""),
        ("died", "w0-1", 1, 37, ""),
        ("placed", "w0-1", 2, 37, ""),
        ("interrupted", "w0-1", 2, 41, "preempted"),
        ("ended", "w0-1", 2, 50, "length"),
    ]
    assert await redis.pttl(KEYS.timeline) > 0


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


# --- traces -------------------------------------------------------------------------------------------------

PARENT = span_name("ab" * 16, "cd" * 8)


class Collector:
    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []

    def export(self, span: TraceSpan) -> None:
        self.spans.append(span)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Collector:
    collector = Collector()
    monkeypatch.setattr(tracing, "exporter", collector)
    return collector


def traced_request() -> Generate:
    return Generate("r1", "d", pack_ids([1, 2, 3]), StoppingParams(50), traceparent=PARENT)


def shown(spans: list[TraceSpan]) -> list[tuple[str, int, int, str]]:
    ms = 1_000_000
    return [(span.name, span.start_ns // ms, span.end_ns // ms, span.error) for span in spans]


QUEUED = TimelineEvent(0, "queued", num_tokens=3)
PLACED = TimelineEvent(10, "placed", "w0", 1)
FIRST = TimelineEvent(20, "prefilled", "w0", 1, 1)
DIED = TimelineEvent(50, "died", "w0", 1, 8)
PLACED_AGAIN = TimelineEvent(60, "placed", "w1", 2, 8)
GOES_ON = TimelineEvent(70, "prefilled", "w1", 2, 9)
END = TimelineEvent(90, "ended", "w1", 2, 20, "length")
UNSEEN = TimelineEvent(95, "ended")


def test_a_death_is_two_attempts_and_one_decode() -> None:
    spans = spans_of(traced_request(), [QUEUED, PLACED, FIRST, DIED, PLACED_AGAIN, GOES_ON, END], UNSEEN)
    assert shown(spans) == [
        ("queued", 0, 10, ""),
        ("queued", 50, 60, ""),
        ("infer", 10, 50, "worker w0 died"),
        ("prefill", 10, 20, ""),
        ("infer", 60, 90, ""),
        ("prefill", 60, 70, ""),
        ("decode", 20, 90, ""),
    ]
    *_, first, _, second, prefill, decode = spans
    assert second.links == [first.traceparent]
    assert prefill.parent_id == ids_of(second.traceparent)[1]
    assert [event.name for event in decode.events] == ["first_token", "died", "resume"]
    assert decode.attributes["gen_ai.usage.output_tokens"] == 20
    assert len({span.traceparent for span in spans}) == len(spans)
    assert {span.parent_id for span in (first, second, decode)} == {"cd" * 8}


def test_what_was_never_written_follows_from_what_came_next() -> None:
    """A batcher may die before it writes its last events; the end may have no event at all."""
    spans = spans_of(traced_request(), [QUEUED, FIRST], TimelineEvent(80, "ended"))
    assert shown(spans) == [
        ("queued", 0, 20, ""),
        ("infer", 20, 80, ""),
        ("prefill", 20, 20, ""),
        ("decode", 20, 80, ""),
    ]


async def test_a_new_batcher_exports_what_its_predecessor_recorded(
    redis: Redis, collector: Collector
) -> None:
    one = sequence()
    one.request = traced_request()
    former, later = (TimelineWriter(PoolClient(redis, KEYS), lambda: NOW_MS) for _ in range(2))
    former.record_queued(one)
    one.attempt = 1
    former.record(one, "placed", worker="w0", at_ms=NOW_MS + 1)
    await former.write()
    later.traces.note_former([one])
    later.record(one, "prefilled", worker="w0", num_tokens=1, at_ms=NOW_MS + 2)
    later.record(one, "ended", worker="w0", num_tokens=9, why="length", at_ms=NOW_MS + 3)
    later.record_dequeued(one)
    later.traces.export_ended()
    assert not collector.spans, "its beginning is not read yet"
    await later.traces.recall()
    assert later.is_due
    await later.write()
    assert [span.name for span in collector.spans] == ["queued", "infer", "prefill", "decode"]
    assert not later.traces.live
