"""TimelineWriter: records what happens to requests, for people, in the stream `timeline` and in traces; and
counts it.

Nothing depends on it.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from itertools import islice

from batcher.scheduling.plan_builder import PendingPlan
from batcher.scheduling.replica import Replica
from batcher.scheduling.sequence import Sequence
from batcher.traces import RequestTraces
from common.broker.client import ERRORS, describe_error
from common.broker.committed import Committed
from common.broker.keys import parse_stream_id
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.events import INTERRUPTED, Timeline, TimelineEvent
from common.messages.plan import Report
from common.metrics import catalogue
from common.process.logs import plural

log = logging.getLogger(__name__)

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
        if sequence.request.traceparent:
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

    def record_death(self, incarnation: str, sequences: Iterable[Sequence]) -> None:
        """Record the death of a worker, once the committed tokens of the sequences it held have been read."""
        catalogue.WORKERS_LOST.add()
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
        if sequence.request.traceparent:
            self.traces.end(sequence.request_id, self.clock())

    def note_unseen_end(self, sequence: Sequence, state: Committed) -> None:
        """Note for its trace how a request ended that had its end while no batcher was active."""
        if sequence.request.traceparent:
            self.traces.note_unseen_end(sequence, state, self.clock())

    @property
    def has_unwritten(self) -> bool:
        return bool(self.unwritten or self.traces.over)

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
