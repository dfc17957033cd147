"""PlanStream: the plans of a worker, in order, each as soon as it is written.

Their ids are consecutive numbers, so a read can wait at the broker for the plan behind the one that another
read waits for. What is written while the reply to that one travels, or its next question, finds a reader.
"""

import asyncio

from redis.asyncio import Redis

from common.broker.stream_ids import parse_stream_id

NUM_READS = 2
BLOCK_MS = 5000

StreamId = tuple[int, int]
Entry = tuple[bytes, dict[bytes, bytes]]


class PlanStream:
    """Reads the stream of a worker's plans.

    Attributes:
        last: id of the last entry returned.
        reads: those under way, by the id behind which each of them reads.
    """

    def __init__(self, redis: Redis, name: str) -> None:
        self.redis = redis
        self.name = name
        self.last: StreamId = (0, 0)
        self.reads: dict[StreamId, asyncio.Task[list[Entry]]] = {}

    async def next(self) -> list[Entry]:
        """Return new entries, or none after a few seconds. Raises what the broker does."""
        self.read_ahead()
        first = min(self.reads)  # whatever another read has returned, this one returns, too
        await asyncio.wait([self.reads[first]])
        entries = [entry for entry in self.reads.pop(first).result() if parse_stream_id(entry[0]) > self.last]
        if entries:
            self.last = parse_stream_id(entries[-1][0])
        return entries

    def read_ahead(self) -> None:
        """Have a read wait for each of the next entries, the first one before the others. One that failed
        ahead of its time is asked for again.
        """
        self.reads = {
            after: read for after, read in self.reads.items() if not (read.done() and read.exception())
        }
        epoch, number = self.last
        first = min([self.last, *self.reads])
        for after in [first, *((epoch, number + ahead) for ahead in range(1, NUM_READS))]:
            if after not in self.reads and len(self.reads) < NUM_READS:
                self.reads[after] = asyncio.create_task(self.read(after))

    async def read(self, after: StreamId) -> list[Entry]:
        reply = await self.redis.xread({self.name: "{}-{}".format(*after)}, block=BLOCK_MS)
        return reply[0][1] if reply else []

    def close(self) -> None:
        for read in self.reads.values():
            read.cancel()
