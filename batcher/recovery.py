"""Resume: what is committed of interrupted requests is read, kept, and handed back to the scheduler."""

from redis.asyncio import Redis

from batcher.sequence import Sequence
from common.broker import committed
from common.broker.client import script
from common.broker.committed import Committed
from common.broker.keys import TOKENS_TTL_MS, Keys


def count_crashes(sequence: Sequence, state: Committed) -> int:
    """Incarnations in a row that ended under a request without a token committed beyond its base."""
    if state.num_tokens > state.base:
        return 0
    seen = sequence.crash_count if sequence.attempt else state.crash_count
    return seen + sequence.suspect


class Recovery:
    """Reads requests back. It may be repeated at any point: sequences change only after everything was kept."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis, self.keys = redis, keys
        self.keep_script = script(redis, "save_committed")

    async def read(self, sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Brings sequences up to what is committed. Returns those that live, and those that are over."""
        states = await committed.read(self.redis, self.keys, [sequence.request_id for sequence in sequences])
        live: list[Sequence] = []
        over: list[Sequence] = []
        for sequence in sequences:
            state = states[sequence.request_id]
            (live if state.known and not state.terminal else over).append(sequence)
        crash_count = [count_crashes(sequence, states[sequence.request_id]) for sequence in live]
        for sequence, count in zip(live, crash_count, strict=True):
            await self.keep(sequence, states[sequence.request_id], count)
        for sequence, count in zip(live, crash_count, strict=True):
            state = states[sequence.request_id]
            sequence.records, sequence.attempt, sequence.crash_count, sequence.suspect = (
                state.records,
                state.attempt,
                count,
                False,
            )
        return live, over

    async def keep(self, sequence: Sequence, state: Committed, crash_count: int) -> None:
        """What only the log of a worker says moves to the request's own string."""
        await self.keep_script(
            keys=[self.keys.tokens(sequence.request_id), self.keys.request(sequence.request_id)],
            args=[state.spilled_bytes, state.records[state.spilled_bytes :], TOKENS_TTL_MS, crash_count],
        )

    async def stranger(self, sequence: Sequence, settled: set[str]) -> str | None:
        """The incarnation that holds a request from before this epoch, when it is none that answered or died
        since.
        """
        state = (await committed.read(self.redis, self.keys, [sequence.request_id]))[sequence.request_id]
        return state.worker if state.worker and not state.terminal and state.worker not in settled else None
