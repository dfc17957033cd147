"""Resume: what is committed of interrupted requests is read, kept, and handed back to the scheduler."""

from redis.asyncio import Redis

from batcher.sequence import Sequence
from common import recover
from common.broker import script
from common.keys import Keys
from common.messages import RECORD
from common.recover import Committed

TOKENS_TTL_MS = 3_600_000


def count_strikes(sequence: Sequence, state: Committed, struck: bool) -> int:
    """Incarnations in a row that ended under a request without a token committed beyond its base."""
    if state.num_tokens > state.base:
        return 0
    return sequence.strikes + 1 if struck else state.strikes


class Recovery:
    """Reads requests back. It may be repeated at any point: sequences change only after everything was kept."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis, self.keys = redis, keys
        self.keep_script = script(redis, "keep")

    async def read(self, sequences: list[Sequence], struck: bool) -> tuple[list[Sequence], list[Sequence]]:
        """Brings sequences up to what is committed; `struck` when their worker died. Returns those that live, and those that are over."""
        states = await recover.read(self.redis, self.keys, [sequence.request_id for sequence in sequences])
        over = [one for one in sequences if not states[one.request_id].known or states[one.request_id].terminal]
        live = [one for one in sequences if one not in over]
        strikes = {one.request_id: count_strikes(one, states[one.request_id], struck) for one in live}
        for sequence in live:
            await self.keep(sequence, states[sequence.request_id], strikes[sequence.request_id])
        for sequence in live:
            state = states[sequence.request_id]
            sequence.records, sequence.attempt, sequence.strikes = state.records, state.attempt, strikes[sequence.request_id]
        return live, over

    async def keep(self, sequence: Sequence, state: Committed, strikes: int) -> None:
        """What only the log of a worker says moves to the request's own string."""
        await self.keep_script(
            keys=[self.keys.tokens(sequence.request_id), self.keys.home(sequence.request_id)],
            args=[state.spilled, state.records[state.spilled * RECORD.size :], TOKENS_TTL_MS, strikes],
        )

    async def stranger(self, sequence: Sequence, settled: set[str]) -> str | None:
        """The incarnation that holds a request from before this epoch, when it is none that answered or died since."""
        state = (await recover.read(self.redis, self.keys, [sequence.request_id]))[sequence.request_id]
        return state.worker if state.worker and not state.terminal and state.worker not in settled else None
