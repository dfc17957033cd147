"""What happens to requests: told to people in the stream `timeline`, and counted. Nothing depends on it."""

import logging
import time
from collections.abc import Callable, Iterable
from itertools import islice

from redis.asyncio import Redis

from batcher.pending_plan import Order
from batcher.replica import Replica
from batcher.sequence import Sequence
from common.broker.client import ERRORS, describe_error
from common.broker.keys import Keys
from common.broker.stream_ids import parse_stream_id
from common.messages.codec import encode
from common.messages.finish_reasons import INTERRUPTED
from common.messages.plan import Report
from common.messages.timeline import Timeline, TimelineEvent
from common.metrics import catalogue

log = logging.getLogger(__name__)

MAX_ENTRIES, REQUESTS_PER_ENTRY = 20_000, 10
"""Bounds of the stream: it holds some 200,000 parts of lives, a few tens of MB, and is gone a day after the
last one.
"""
LIFE_TTL_MS = 86_400_000
WRITE_S = 0.1
MAX_UNTOLD = 10_000


class Lives:
    """Collects what happens and writes it ten times a second at most. `clock` gives the broker's time in ms."""

    def __init__(self, redis: Redis, keys: Keys, clock: Callable[[], int]) -> None:
        self.redis, self.keys, self.clock = redis, keys, clock
        self.untold: dict[str, list[TimelineEvent]] = {}
        self.written_s = 0.0

    def note(
        self,
        sequence: Sequence,
        what: str,
        worker: str = "",
        num_tokens: int = 0,
        why: str = "",
        at_ms: int | None = None,
    ) -> None:
        happening = TimelineEvent(at_ms or self.clock(), what, worker, sequence.attempt, num_tokens, why)
        self.untold.setdefault(sequence.request_id, []).append(happening)

    def queued(self, sequence: Sequence) -> None:
        self.note(
            sequence, "queued", num_tokens=sequence.num_prompt, at_ms=parse_stream_id(sequence.entry_id)[0]
        )

    def placed(self, order: Order) -> None:
        """A plan was handed over."""
        catalogue.GRANTS.add()
        for row in order.started:
            self.note(row.sequence, "placed", order.replica.capacity.incarnation, row.sequence.base)

    def heard(self, replica: Replica, report: Report) -> None:
        """A report, before the scheduler takes it in."""
        worker = replica.capacity.incarnation
        for number, _, _ in report.prefilled:
            if (row := replica.rows.get(number)) is not None:
                self.note(row.sequence, "prefilled", worker, row.sequence.base + 1)
        for number, why, end in report.ended:
            if (row := replica.rows.get(number)) is None or row.ended:
                continue
            self.note(row.sequence, "interrupted" if why in INTERRUPTED else "ended", worker, end, why)
            if why in INTERRUPTED:
                self.count_resume(row.sequence, why)

    def died(self, incarnation: str, sequences: Iterable[Sequence]) -> None:
        """A worker is gone, and what it had committed of these has been read."""
        catalogue.WORKERS_LOST.add()
        for sequence in sequences:
            self.note(sequence, "died", incarnation, sequence.base)
            self.count_resume(sequence, "died")

    def taken_over(self, sequence: Sequence) -> None:
        """Found in the queue by a new batcher; where it was never placed, perhaps nobody has told yet that it
        was queued.
        """
        if not sequence.attempt:
            self.queued(sequence)
            return
        self.note(sequence, "taken_over", num_tokens=sequence.base)
        self.count_resume(sequence, "takeover")

    def ended(self, sequence: Sequence, why: str) -> None:
        """The batcher itself says the terminal."""
        self.note(sequence, "ended", num_tokens=sequence.base, why=why)

    def count_resume(self, sequence: Sequence, cause: str) -> None:
        catalogue.RESUMES.add(1, catalogue.service_class(sequence.request.priority), cause)

    async def write(self) -> None:
        """Tells what has not been told. Should the broker refuse, it is kept for later, up to a bound."""
        if not self.untold or time.monotonic() - self.written_s < WRITE_S:
            return
        self.written_s = time.monotonic()
        try:
            async with self.redis.pipeline(transaction=False) as pipe:
                parts = iter(self.untold.items())
                while fields := {
                    request_id: encode(Timeline(told))
                    for request_id, told in islice(parts, REQUESTS_PER_ENTRY)
                }:
                    pipe.xadd(self.keys.timeline, fields, maxlen=MAX_ENTRIES)  # type: ignore[arg-type]
                pipe.pexpire(self.keys.timeline, LIFE_TTL_MS)
                await pipe.execute()
            self.untold = {}
        except ERRORS as error:
            log.debug("lives of %d requests wait: %s", len(self.untold), describe_error(error))
            if len(self.untold) > MAX_UNTOLD:
                self.untold = {}
