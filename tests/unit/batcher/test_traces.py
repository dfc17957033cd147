"""RequestTraces: spans that follow from the events of a request."""

import pytest
from redis.asyncio import Redis

from batcher.timeline import TimelineWriter
from batcher.traces import spans_of
from common import tracing
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.messages.events import TimelineEvent
from common.messages.records import pack_ids
from common.messages.request import Generate, StoppingParams
from common.tracing import TraceSpan, ids_of, span_name
from tests.unit.batcher.test_timeline import NOW_MS, sequence

KEYS = Keys("default")
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


def request() -> Generate:
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
    spans = spans_of(request(), [QUEUED, PLACED, FIRST, DIED, PLACED_AGAIN, GOES_ON, END], UNSEEN)
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


def test_the_order_of_events_is_that_of_their_record() -> None:
    """The time of `queued` is the broker's; the others are estimates of it."""
    placed = TimelineEvent(9, "placed", "w0", 1)
    late = TimelineEvent(10, "queued", num_tokens=3)
    waits = [
        span for span in spans_of(request(), [late, placed, FIRST, END], UNSEEN) if span.name == "queued"
    ]
    assert [span.attributes["tokenfleet.cause"] for span in waits] == ["queued"]


def test_a_preemption_is_an_event_by_its_reason() -> None:
    preempted = TimelineEvent(40, "interrupted", "w0", 1, 5, "preempted")
    *_, decode = spans_of(request(), [QUEUED, PLACED, FIRST, preempted, PLACED_AGAIN, GOES_ON, END], UNSEEN)
    assert [event.name for event in decode.events] == ["first_token", "preempted", "resume"]


def test_a_request_that_never_starts_has_its_wait_alone() -> None:
    expired = TimelineEvent(30, "ended", why="expired")
    assert shown(spans_of(request(), [QUEUED, expired], UNSEEN)) == [("queued", 0, 30, "")]


def test_what_was_never_written_follows_from_what_came_next() -> None:
    """A batcher may die before it writes its last events; the end may have no event at all."""
    spans = spans_of(request(), [QUEUED, FIRST], TimelineEvent(80, "ended"))
    assert shown(spans) == [
        ("queued", 0, 20, ""),
        ("infer", 20, 80, ""),
        ("prefill", 20, 20, ""),
        ("decode", 20, 80, ""),
    ]


def test_all_who_export_a_request_give_its_spans_the_same_ids() -> None:
    events = [QUEUED, PLACED, FIRST, END]
    one, two = (spans_of(request(), events, TimelineEvent(ms, "ended")) for ms in (95, 99))
    assert one == two


def test_a_request_whose_batcher_died_at_once_has_its_end_from_its_state() -> None:
    spans = spans_of(request(), [QUEUED], TimelineEvent(80, "ended", "w0", 1, 9, "length"))
    assert shown(spans) == [("queued", 0, 0, ""), ("infer", 0, 80, ""), ("decode", 0, 80, "")]
    assert not spans[-1].events and spans[-1].attributes["gen_ai.usage.output_tokens"] == 9


async def test_a_new_batcher_exports_what_its_predecessor_recorded(
    redis: Redis, collector: Collector
) -> None:
    one = sequence()
    one.request = request()
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


async def test_a_request_that_is_not_traced_is_not_kept(redis: Redis, collector: Collector) -> None:
    writer, one = TimelineWriter(PoolClient(redis, KEYS), lambda: NOW_MS), sequence()
    writer.record_queued(one)
    writer.record_dequeued(one)
    await writer.write()
    assert not writer.traces.live and not collector.spans
