"""Backlog: what was said before this epoch: requests, by the worker that held each, and deaths."""

import contextlib
from collections.abc import Callable

from batcher.inbox import StreamEntry
from batcher.scheduling.sequence import Sequence
from common.broker import committed
from common.broker.committed import Committed
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode
from common.messages.plan import WorkerDied

ENTRIES_IN_ONE_READ = 256


class Backlog:
    """Read once, in slices, at the start of an epoch. Every plan of earlier epochs is refused by then.

    Attributes:
        control_id: the last entry of `control` that was read.
        dead: workers of which a launcher said that they died.
        last_id: the last entry of `requests` that was read; later ones are new requests.
        unread: sequences whose state was not read yet.
        held_by: sequences by the worker that the last plan gave them to; "" has those that no worker holds.
        ended: sequences that have their terminal.
    """

    def __init__(self, pool: PoolClient) -> None:
        self.pool = pool
        self.control_id = "0"
        self.dead: set[str] = set()
        self.last_id = ""
        self.unread: list[Sequence] = []
        self.held_by: dict[str, list[Sequence]] = {}
        self.ended: list[Sequence] = []

    async def read_control(self) -> None:
        """Read the deaths. Cancels also stand in the requests, and workers in their heartbeats."""
        while entries := await self.pool.redis.xrange(
            self.pool.keys.control, f"({self.control_id}", count=ENTRIES_IN_ONE_READ
        ):
            self.control_id = entries[-1][0].decode()
            for _, fields in entries:
                if (data := fields.get(b"died")) is not None:
                    with contextlib.suppress(WireError):
                        self.dead.add(decode(WorkerDied, data).incarnation)

    async def read_requests(self, on_entry: Callable[[StreamEntry], None]) -> None:
        """Pass on every entry of `requests`, and read the state of the sequences that come of them."""
        while True:
            await self.read_states()
            if not (entries := await self.read_entries()):
                return
            for entry in entries:
                on_entry(entry)

    async def read_entries(self) -> list[StreamEntry]:
        """Return the next entries of `requests`; none at its end."""
        begin, stream = f"({self.last_id}" if self.last_id else "-", self.pool.keys.requests
        entries = await self.pool.redis.xrange(stream, begin, count=ENTRIES_IN_ONE_READ)
        if entries:
            self.last_id = entries[-1][0].decode()
        return [StreamEntry(stream, entry_id.decode(), fields) for entry_id, fields in entries]

    async def read_states(self) -> None:
        """Read the state of the sequences in `unread`: who held them, and whether they go on."""
        names = [sequence.request_id for sequence in self.unread]
        states = await committed.read_saved(self.pool, names, with_tokens=False)
        for sequence in self.unread:
            self.sort(sequence, states[sequence.request_id])
        self.unread = []

    def sort(self, sequence: Sequence, state: Committed) -> None:
        if not state.is_live:
            self.ended.append(sequence)
            return
        sequence.attempt = state.attempt
        sequence.crash_count = state.crash_count
        if state.cancelled:
            sequence.stop_reason = "client"
        self.held_by.setdefault(state.worker, []).append(sequence)
