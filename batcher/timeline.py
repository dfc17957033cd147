"""Timeline: records what happens to requests, for people, in the stream `timeline` and in traces; and counts
it. Nothing depends on it.

The spans of a request follow from its timeline alone, and are exported when it has ended. The timeline is in
Redis, so a new batcher reads what its predecessor had recorded, and the trace of a request has no hole.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import islice

from batcher.scheduling.plan_builder import PendingPlan
from batcher.scheduling.replica import Replica
from batcher.scheduling.sequence import Sequence
from common import tracing
from common.broker.client import ERRORS, describe_error
from common.broker.committed import Committed
from common.broker.keys import parse_stream_id
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode, encode
from common.messages.events import FINISHED, INTERRUPTED, Timeline, TimelineEvent
from common.messages.plan import Report
from common.messages.request import Generate
from common.metrics import catalogue
from common.process.logs import plural
from common.tracing import NS_PER_MS, SpanEvent, TraceSpan, Value, derive_span, ids_of

log = logging.getLogger(__name__)

CHUNK = 500
"""Entries of the timeline in one read."""
ENDED, PLACED, QUEUED, PREFILLED = "ended", "placed", "queued", "prefilled"
DECODE_EVENTS = ("interrupted", "died", "taken_over")
MARKS = {PREFILLED: "resume", "interrupted": "", "died": "died", "taken_over": "taken_over"}
"""Event → its name in the span `decode`; empty: why it came."""


@dataclass(eq=False)
class RequestTraces:
    """Collects the events of live requests that are traced.

    Attributes:
        live: requests and their events, by request id.
        ends: of those that are over, which stand for an end without an event: their spans are due.
        unread: ids of requests whose events from before this epoch are not read yet.
    """

    pool: PoolClient
    live: dict[str, tuple[Generate, list[TimelineEvent]]] = field(default_factory=dict)
    ends: dict[str, TimelineEvent] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)

    def add(self, request: Generate, event: TimelineEvent) -> None:
        if request.traceparent and tracing.is_on():
            self.live.setdefault(request.request_id, (request, []))[1].append(event)

    def end(self, request_id: str, end: TimelineEvent) -> None:
        """Note that a request is over; what is known of its end first counts."""
        if request_id in self.live:
            self.ends.setdefault(request_id, end)

    def export_ended(self) -> None:
        """Export the spans of requests that have ended. Those of an earlier epoch wait for its events."""
        for request_id in self.ends.keys() - self.unread:
            request, events = self.live.pop(request_id)
            tracing.export(*spans_of(request, events, self.ends.pop(request_id)))

    # --- events from before this epoch ----------------------------------------------------------------------

    def note_former(self, sequences: Iterable[Sequence]) -> None:
        """Note requests from before this epoch, whose events `recall` will read."""
        for sequence in sequences:
            at_ms = parse_stream_id(sequence.entry_id)[0]
            self.add(sequence.request, TimelineEvent(at_ms, QUEUED, num_tokens=sequence.num_prompt))
        self.unread.update(self.live)

    async def recall(self) -> None:
        """Read the former events of requests from before this epoch. Nothing depends on it."""
        try:
            found = await self.read_former()
        except ERRORS as error:
            log.warning("timelines of an earlier epoch are not in traces: %s", describe_error(error))
            found = {}
        for request_id, former in found.items():
            request, (queued, *later) = self.live[request_id]
            self.live[request_id] = request, [*dict.fromkeys((queued, *former, *later))]
        self.unread.clear()

    async def read_former(self) -> dict[str, list[TimelineEvent]]:
        """Events by request id, oldest first. The stream is read backwards until all beginnings are there."""
        found: dict[str, list[TimelineEvent]] = {}
        newest, unfinished = "+", {name.encode(): name for name in self.unread}
        while unfinished and (
            entries := await self.pool.redis.xrevrange(self.pool.keys.timeline, newest, "-", count=CHUNK)
        ):
            for _, fields in entries:
                for key in unfinished.keys() & fields.keys():
                    events = read_events(fields[key])
                    found[unfinished[key]] = events + found.get(unfinished[key], [])
                    if events and events[0].what == QUEUED:
                        del unfinished[key]
            newest = f"({entries[-1][0].decode()}"
        return found


def read_events(data: bytes) -> list[TimelineEvent]:
    """Events of one entry; none if another program has written it."""
    try:
        return decode(Timeline, data).events
    except WireError:
        return []


# --- spans of events ----------------------------------------------------------------------------------------


def spans_of(request: Generate, events: Iterable[TimelineEvent], end: TimelineEvent) -> list[TraceSpan]:
    """The spans of a request that has ended: each wait in the queue, each attempt with its prefill, and one
    decode over all attempts. `end` stands for an end that is no event.
    """
    happened = complete(events, end)
    attempts = [event for event in happened if event.what == PLACED]
    return [
        *queued_spans(request, happened),
        *(span for placed in attempts for span in attempt_spans(request, placed, happened)),
        *decode_spans(request, happened),
    ]


def complete(events: Iterable[TimelineEvent], end: TimelineEvent) -> list[TimelineEvent]:
    """The events in the order of their record, the end last; times of two clocks need not show that order. A
    batcher may die before it writes its last events: then an attempt was placed when it is first heard of.
    """
    events = [*events]
    end = next((event for event in events if event.what == ENDED), end)
    placed = {event.attempt for event in events if event.what == PLACED} | {0}
    happened: list[TimelineEvent] = []
    for event in (*(event for event in events if event.what != ENDED), end):
        if event.attempt not in placed and (event.worker or event is end):
            placed.add(event.attempt)
            at_ms = happened[-1].at_ms if event is end and happened else event.at_ms
            happened.append(replace(event, at_ms=at_ms, what=PLACED, num_tokens=0, why=""))
        happened.append(event)
    return happened


def queued_spans(request: Generate, events: Iterable[TimelineEvent]) -> Iterator[TraceSpan]:
    """Of each wait, from what let a request wait to what ended that."""
    began: TimelineEvent | None = None
    for event in events:
        if event.what in (PLACED, ENDED) and began is not None:
            cause = {"tokenfleet.cause": began.why or began.what}
            known: dict[str, Value] = {**cause, "tokenfleet.service_class": request.service_class}
            yield make_span(request, "queued", str(began.at_ms), began.at_ms, event.at_ms, known)
            began = None
        elif event.what in (QUEUED, *DECODE_EVENTS) and began is None:
            began = event


def attempt_spans(request: Generate, placed: TimelineEvent, events: Items[TimelineEvent]) -> list[TraceSpan]:
    """The span `infer` of one attempt, from its placing to its end, with a link to the attempt before it; and
    its `prefill`.
    """
    later = events[events.index(placed) + 1 :]
    over = next(event for event in later if event.what in (PLACED, ENDED, *DECODE_EVENTS))
    own = attempt_name(request, placed.attempt)
    known: dict[str, Value] = {"tokenfleet.attempt": placed.attempt, "tokenfleet.worker": placed.worker}
    cause = over.why or over.what
    infer = make_span(
        request,
        "infer",
        "",
        placed.at_ms,
        over.at_ms,
        known | {"tokenfleet.end": cause, "tokenfleet.base": placed.num_tokens},
        traceparent=own,
        links=[attempt_name(request, placed.attempt - 1)] if placed.attempt > 1 else [],
        error=f"worker {placed.worker} died" if over.what == "died" else failure_of(over),
    )
    first = next((event for event in later[: later.index(over)] if event.what == PREFILLED), None)
    if first is None:
        return [infer]
    cached = {"tokenfleet.cached_tokens": placed.num_cached, "gen_ai.usage.input_tokens": request.num_prompt}
    prefill = TraceSpan(
        derive_span(own, "prefill"),
        "prefill",
        NS_PER_MS * placed.at_ms,
        NS_PER_MS * first.at_ms,
        ids_of(own)[1],
        attributes=known | cached,
    )
    return [infer, prefill]


def attempt_name(request: Generate, attempt: int) -> str:
    """The name of the span of an attempt: all who know the request and the attempt's number know it."""
    return derive_span(request.traceparent, request.request_id, "infer", str(attempt))


def decode_spans(request: Generate, events: Items[TimelineEvent]) -> list[TraceSpan]:
    """One span from the first token to the end, over all attempts; none for a request without a token. If the
    event of the first token is lost, it begins with the first attempt.
    """
    [*before, end] = events
    firsts = [i for i, event in enumerate(before) if event.what == PREFILLED]
    if not firsts and end.num_tokens:
        firsts = [i for i, event in enumerate(before) if event.what == PLACED]
    if not firsts:
        return []
    first, *between = before[firsts[0] :]
    marks = [mark(first, "first_token")] if first.what == PREFILLED else []
    marks += [mark(event, MARKS[event.what] or event.why) for event in between if event.what in MARKS]
    known: dict[str, Value] = {
        "gen_ai.usage.input_tokens": request.num_prompt,
        "gen_ai.usage.output_tokens": end.num_tokens,
        "gen_ai.response.finish_reasons": [end.why or "unknown"],
        "tokenfleet.attempts": max(event.attempt for event in events),
    }
    return [
        make_span(
            request,
            "decode",
            "",
            first.at_ms,
            end.at_ms,
            known,
            links=[attempt_name(request, n) for n in sorted({e.attempt for e in events if e.what == PLACED})],
            events=marks,
            error=failure_of(end),
        )
    ]


def mark(event: TimelineEvent, name: str) -> SpanEvent:
    known: dict[str, Value] = {"tokenfleet.attempt": event.attempt, "tokenfleet.tokens": event.num_tokens}
    worker: dict[str, Value] = {"tokenfleet.worker": event.worker} if event.worker else {}
    return SpanEvent(NS_PER_MS * event.at_ms, name, known | worker)


def failure_of(event: TimelineEvent) -> str:
    """Why a request failed at this event; empty if it did not."""
    return event.why if event.what == ENDED and event.why not in (*FINISHED, "") else ""


def make_span(
    request: Generate,
    name: str,
    word: str,
    began_ms: int,
    ended_ms: int,
    attributes: dict[str, Value],
    *,
    traceparent: str = "",
    links: Items[str] = (),
    events: Items[SpanEvent] = (),
    error: str = "",
) -> TraceSpan:
    """A span of a request, with its id. `word` tells it from others of its name."""
    return TraceSpan(
        traceparent or derive_span(request.traceparent, request.request_id, name, word),
        name,
        NS_PER_MS * began_ms,
        NS_PER_MS * ended_ms,
        ids_of(request.traceparent)[1],
        attributes={"tokenfleet.request.id": request.request_id} | attributes,
        events=events,
        links=links,
        error=error,
    )


MAX_TIMELINE_ENTRIES = 20_000
REQUESTS_PER_ENTRY = 10
"""Together they bound the stream: some 200,000 parts of timelines, a few tens of MB."""
TIMELINE_TTL_MS = 86_400_000
WRITE_INTERVAL_S = 0.1
MAX_UNWRITTEN = 10_000
"""Requests with unwritten events; with more, all unwritten events are dropped."""


class TimelineWriter:
    """Collects events and writes them ten times a second at most. `clock` returns the broker's time in ms."""

    def __init__(self, pool: PoolClient, clock: Callable[[], int]) -> None:
        self.pool = pool
        self.traces = RequestTraces(pool)
        self.clock = clock
        self.unwritten: dict[str, list[TimelineEvent]] = {}
        self.written_s = 0.0

    def record(
        self,
        sequence: Sequence,
        what: str,
        *,
        worker: str = "",
        num_tokens: int = 0,
        why: str = "",
        at_ms: int | None = None,
        num_cached: int = 0,
    ) -> None:
        at_ms = at_ms or self.clock()
        event = TimelineEvent(at_ms, what, worker, sequence.attempt, num_tokens, why, num_cached)
        self.unwritten.setdefault(sequence.request_id, []).append(event)
        self.traces.add(sequence.request, event)

    def record_queued(self, sequence: Sequence) -> None:
        at_ms = parse_stream_id(sequence.entry_id)[0]
        self.record(sequence, "queued", num_tokens=sequence.num_prompt, at_ms=at_ms)

    def record_plan(self, published: PendingPlan) -> None:
        catalogue.PLANS.add()
        if published.joins:
            catalogue.BATCH_CONCAT.add(1, published.joins)
        capacity = published.replica.capacity
        for row in published.rows:
            sequence = row.sequence
            self.record(
                sequence,
                "placed",
                worker=capacity.incarnation,
                num_tokens=sequence.base,
                num_cached=row.num_cached,
            )
            if capacity.prefix_caching and sequence.block_hashes:
                catalogue.PREFIX_QUERIES.add(sequence.num_known)
                catalogue.PREFIX_HITS.add(row.num_cached)

    def record_report(self, replica: Replica, report: Report) -> None:
        """Record a report that the scheduler has not applied yet."""
        worker = replica.capacity.incarnation
        for number, _, _ in report.prefilled:
            if (row := replica.rows.get(number)) is not None:
                self.record(row.sequence, "prefilled", worker=worker, num_tokens=row.sequence.base + 1)
        for number, why, end in report.ended:
            if (row := replica.rows.get(number)) is None or row.ended:
                continue
            what = "interrupted" if why in INTERRUPTED else "ended"
            self.record(row.sequence, what, worker=worker, num_tokens=end, why=why)
            if why in INTERRUPTED:
                self.count_resume(row.sequence, why)

    def record_death(self, incarnation: str, sequences: Iterable[Sequence], why: str) -> None:
        """Record the end of a worker, once the committed tokens of the sequences it held have been read."""
        catalogue.WORKERS_LOST.add(why == "died")
        for sequence in sequences:
            self.record(sequence, "died", worker=incarnation, num_tokens=sequence.base)
            self.count_resume(sequence, "died")

    def record_takeover(self, sequence: Sequence) -> None:
        """Record that a new batcher found the request in the queue.

        A request that was never placed is recorded as queued: the former batcher may not have recorded it.
        """
        if not sequence.attempt:
            self.record_queued(sequence)
            return
        self.record(sequence, "taken_over", num_tokens=sequence.base)
        self.count_resume(sequence, "takeover")

    def count_resume(self, sequence: Sequence, cause: str) -> None:
        catalogue.RESUMES.add(1, sequence.request.service_class, cause)

    def record_dequeued(self, sequence: Sequence) -> None:
        """Note that a request has left the queue: its trace is over."""
        self.traces.end(sequence.request_id, TimelineEvent(self.clock(), ENDED))

    def note_unseen_end(self, sequence: Sequence, state: Committed) -> None:
        """Note for its trace how a request ended that had its end while no batcher was active."""
        num_tokens, known = max(0, state.num_final), (state.worker, state.attempt)
        self.traces.end(
            sequence.request_id, TimelineEvent(self.clock(), ENDED, *known, num_tokens, state.terminal)
        )

    @property
    def has_unwritten(self) -> bool:
        return bool(self.unwritten or self.traces.ends)

    @property
    def left_ms(self) -> int:
        """Milliseconds until events may be written."""
        return math.ceil(1000 * (self.written_s + WRITE_INTERVAL_S - time.monotonic()))

    @property
    def is_due(self) -> bool:
        return self.has_unwritten and self.left_ms <= 0

    async def write(self) -> None:
        """Write the events recorded since the last write. If the broker fails, MAX_UNWRITTEN are kept."""
        if not self.is_due:
            return
        self.written_s = time.monotonic()
        self.traces.export_ended()
        if not self.unwritten:
            return
        unwritten, self.unwritten = self.unwritten, {}
        try:
            async with self.pool.redis.pipeline(transaction=False) as pipe:
                items = iter(unwritten.items())
                while fields := {
                    request_id: encode(Timeline(events))
                    for request_id, events in islice(items, REQUESTS_PER_ENTRY)
                }:
                    pipe.xadd(self.pool.keys.timeline, fields, maxlen=MAX_TIMELINE_ENTRIES)  # type: ignore[arg-type]
                pipe.pexpire(self.pool.keys.timeline, TIMELINE_TTL_MS)
                await pipe.execute()
        except ERRORS as error:
            log.debug("timelines of %s wait: %s", plural(len(unwritten), "request"), describe_error(error))
            for request_id, events in self.unwritten.items():  # recorded during the write
                unwritten.setdefault(request_id, []).extend(events)
            self.unwritten = unwritten if len(unwritten) <= MAX_UNWRITTEN else {}
