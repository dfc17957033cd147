"""Recovery: interrupted requests go on from their committed tokens.

Committed tokens are read from the request's own string and from the log of the worker that held it; what only
the log has is saved to the string first, so the log can be deleted.
"""

import logging

from redis.asyncio import Redis

from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from batcher.terminals import Terminals
from batcher.timeline import TimelineWriter
from batcher.workers import WorkerRegistry
from common.broker import committed
from common.broker.client import script
from common.broker.committed import Committed
from common.broker.keys import TOKENS_TTL_MS, Keys

log = logging.getLogger(__name__)


def count_crashes(sequence: Sequence, state: Committed) -> int:
    """Incarnations in a row that died under a request without a token committed beyond its base."""
    if state.num_tokens > state.base:
        return 0
    earlier = sequence.crash_count if sequence.attempt else state.crash_count
    return earlier + sequence.suspect


class Recovery:
    """Resumes requests. Each method may be repeated: sequences change only after everything was saved."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        scheduler: Scheduler,
        workers: WorkerRegistry,
        terminals: Terminals,
        timeline: TimelineWriter,
    ) -> None:
        self.redis = redis
        self.keys = keys
        self.scheduler = scheduler
        self.workers = workers
        self.terminals = terminals
        self.timeline = timeline
        self.save_script = script(redis, "save_committed")

    async def resume(self, sequences: list[Sequence]) -> list[Sequence]:
        """Read what is committed of interrupted requests. Enqueue and return those that are live."""
        live, ended = await self.read_committed(sequences)
        for sequence in live:
            self.scheduler.resume(sequence)
        for sequence in ended:
            await self.terminals.dequeue(sequence)
        return live

    async def restore(self, sequence: Sequence) -> None:
        """Resume a request from before this epoch.

        If its worker has not answered the takeover, that worker is sealed first, or both would go on with it.
        """
        if (incarnation := await self.unknown_holder(sequence)) is not None:
            await self.workers.seal(incarnation)
        self.scheduler.register(sequence)
        for live in await self.resume([sequence]):
            self.timeline.record_takeover(live)

    async def remove_worker(self, incarnation: str, held: list[Sequence]) -> None:
        """Resume what a sealed worker held, and delete its keys."""
        live = await self.resume(held)
        await self.workers.remove_worker_keys(incarnation)
        self.timeline.record_death(incarnation, live)
        log.warning("worker %s is removed; %d of its requests resume", incarnation, len(live))

    async def read_committed(self, sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Update sequences to what is committed. Return those that are live, and those that have ended."""
        states = await committed.read(self.redis, self.keys, [sequence.request_id for sequence in sequences])
        live: list[Sequence] = []
        ended: list[Sequence] = []
        for sequence in sequences:
            state = states[sequence.request_id]
            (live if state.known and not state.terminal else ended).append(sequence)
        crash_counts = [count_crashes(sequence, states[sequence.request_id]) for sequence in live]
        for sequence, crash_count in zip(live, crash_counts, strict=True):
            await self.save(sequence, states[sequence.request_id], crash_count)
        for sequence, crash_count in zip(live, crash_counts, strict=True):
            state = states[sequence.request_id]
            sequence.records = state.records
            sequence.attempt = state.attempt
            sequence.crash_count = crash_count
            sequence.suspect = False
        return live, ended

    async def save(self, sequence: Sequence, state: Committed, crash_count: int) -> None:
        """Append the tokens that only a worker's log has to the request's own string."""
        await self.save_script(
            keys=[self.keys.tokens(sequence.request_id), self.keys.request(sequence.request_id)],
            args=[state.spilled_bytes, state.records[state.spilled_bytes :], TOKENS_TTL_MS, crash_count],
        )

    async def unknown_holder(self, sequence: Sequence) -> str | None:
        """The worker that holds a request from before this epoch, unless it was taken over or removed."""
        states = await committed.read(self.redis, self.keys, [sequence.request_id])
        state = states[sequence.request_id]
        if not state.worker or state.terminal or self.workers.is_taken_over(state.worker):
            return None
        return state.worker
