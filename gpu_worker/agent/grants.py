"""Plans on their way from the batcher to the engine, with the bytes of the pictures that rows must see."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from redis.asyncio import Redis

from common.broker.client import FailureLog
from common.broker.keys import parse_stream_id
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode
from common.messages.plan import NewRow, Plan
from common.messages.request import Picture
from common.metrics import catalogue
from common.process.startup import READY
from gpu_worker.agent.engine_client import EngineClient
from gpu_worker.agent.state import AgentState
from gpu_worker.agent.steps import StepHandler

log = logging.getLogger(__name__)

RETRY_S = 0.05
MAX_CACHED_BYTES = 32 * 2**20
"""Of pictures that were read last: choices of one prompt, and further requests with them, read none again."""
MAX_FRAME_PICTURES = 64 * 2**20
"""Bytes of pictures in one frame, unless one row has more."""


@dataclass(eq=False)
class PictureReader:
    """Reads the bytes of pictures.

    Attributes:
        needs_all: rows need those among cached tokens, too.
        contents: digest → bytes: those that the next rows need, and the ones that were used last.
    """

    pool: PoolClient
    needs_all: bool
    contents: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    failures: FailureLog = field(default_factory=lambda: FailureLog(log, "reading pictures"))

    def needed_by(self, start: NewRow) -> list[Picture]:
        """The pictures of a row that its engine must see: those that have a token whose KV is not cached."""
        num_cached = 0 if self.needs_all else start.num_cached
        return [one for one in start.request.pictures if one.start + one.num_tokens > num_cached]

    async def read_for(self, starts: Iterable[NewRow]) -> None:
        """Read what these rows need, in one round trip, however long the broker is away."""
        needed = {picture.digest: None for start in starts for picture in self.needed_by(start)}
        if not needed:
            return
        self.drop_oldest(keep=needed)
        missing = [digest for digest in needed if digest not in self.contents]
        while missing:
            with self.failures.caught():
                found = await self.pool.redis.mget([self.pool.keys.picture(digest) for digest in missing])
                self.contents |= {digest: one for digest, one in zip(missing, found, strict=True) if one}
                return
            await asyncio.sleep(RETRY_S)

    def drop_oldest(self, keep: Iterable[str]) -> None:
        """Make the bytes that are kept the newest, and drop the oldest of the others beyond the bound."""
        wanted = [digest for digest in keep if digest in self.contents]
        for digest in wanted:
            self.contents.move_to_end(digest)
        num_bytes = sum(map(len, self.contents.values()))
        for digest in [*self.contents][: len(self.contents) - len(wanted)]:
            if num_bytes <= MAX_CACHED_BYTES:
                return
            num_bytes -= len(self.contents.pop(digest))

    def of_row(self, start: NewRow) -> list[bytes] | None:
        """`NewRow.contents`; None if the broker has lost a picture that is needed."""
        needed = {one.digest for one in self.needed_by(start)}
        if not needed <= self.contents.keys():
            return None
        return [self.contents[one.digest] if one.digest in needed else b"" for one in start.request.pictures]


def in_parts(plan: Plan) -> Iterator[Plan]:
    """Yield the plan in parts whose pictures fit into one frame each; stops and blocks are in the first."""
    rows: list[NewRow] = []
    num_bytes = 0
    for start in plan.starts:
        size = sum(map(len, start.contents))
        if rows and num_bytes + size > MAX_FRAME_PICTURES:
            yield replace(plan, starts=rows)
            plan, rows, num_bytes = replace(plan, blocks=[], stops=[]), [], 0
        rows.append(start)
        num_bytes += size
    yield replace(plan, starts=rows)


NUM_READS = 2
BLOCK_MS = 5000

StreamId = tuple[int, int]
Entry = tuple[bytes, dict[bytes, bytes]]


@dataclass(eq=False)
class PlanStream:
    """Reads the stream of a worker's plans, in order, each as soon as it is written.

    Plans have consecutive numbers, so one read can wait at the broker for the plan after the one that another
    read waits for: a plan that is written while a reply is on its way finds a read that waits for it.

    Attributes:
        last: id of the last entry returned.
        reads: reads in progress, each by the id after which it reads.
    """

    redis: Redis
    name: str
    last: StreamId = (0, 0)
    reads: dict[StreamId, asyncio.Task[list[Entry]]] = field(default_factory=dict)

    async def next(self) -> list[Entry]:
        """Return new entries, or none after a few seconds. Raises what the broker raises."""
        self.read_ahead()
        first = min(self.reads)  # it returns all that the others return
        await asyncio.wait([self.reads[first]])
        entries = [entry for entry in self.reads.pop(first).result() if parse_stream_id(entry[0]) > self.last]
        if entries:
            self.last = parse_stream_id(entries[-1][0])
        return entries

    def read_ahead(self) -> None:
        """Have a read wait for each of the next entries. A read that failed is started again."""
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


@dataclass(eq=False)
class PlanHandler:
    """Sends the engine each plan, with what its rows need besides."""

    stream: PlanStream
    pictures: PictureReader
    engine: EngineClient
    state: AgentState
    steps: StepHandler
    failures: FailureLog = field(default_factory=lambda: FailureLog(log, "reading plans"))

    async def run(self) -> None:
        """Apply plans as they come. A plan that cannot be read is counted and skipped."""
        try:
            while True:
                for entry_id, fields in await self.next_entries():
                    try:
                        plan = decode(Plan, fields[b"plan"])
                        await self.pictures.read_for(plan.starts)
                        self.apply(plan)
                    except (WireError, KeyError) as error:
                        catalogue.UNDECODABLE.add()
                        log.error("plan %s cannot be read: %s", entry_id.decode(), error)
        finally:
            self.stream.close()

    async def next_entries(self) -> list[Entry]:
        with self.failures.caught():
            return await self.stream.next()
        await asyncio.sleep(RETRY_S)
        return []

    def apply(self, plan: Plan) -> None:
        """Send the engine a plan, or answer a takeover."""
        state = self.state
        state.plan = plan
        if plan.takeover:
            READY.set()
            state.answer_takeover()
            return
        plan = replace(plan, until=max(state.granted.until, plan.until))
        state.report_clock.on_grant(plan.report_at or (state.step + plan.until + 1) // 2)
        starts = [one for start in plan.starts if (one := self.start_row(start)) is not None]
        state.granted = replace(plan, starts=[], blocks=[], stops=[])
        for number, blocks in plan.blocks:
            if (row := state.table.rows.get(number)) is not None:
                row.blocks += blocks
        if starts:
            state.idle.clear()
        if state.report_clock.is_due(state.step):  # no step may come to wake the flusher
            state.wake.set()
        for part in in_parts(replace(plan, starts=starts)):
            self.engine.send(part)
        for start in starts:
            self.steps.end_at_committed_stop_string(state.table.rows[start.row])
        self.return_unknown_rows(row for row, _ in plan.stops if row not in state.table.rows)

    def start_row(self, start: NewRow) -> NewRow | None:
        """Add a row to the table → what the engine starts; None if its request has failed."""
        row = self.state.table.start(start)
        self.state.budgets.on_start(row)
        contents = self.pictures.of_row(start)
        if contents is None:
            self.steps.fail_at_start(row, "picture_gone")
            return None
        return replace(start, contents=contents) if contents else start

    def return_unknown_rows(self, rows: Iterable[int]) -> None:
        """Report rows that the worker does not hold as preempted, so that their requests go on elsewhere: the
        plan that started them could not be read, or they were released long ago.
        """
        outbox = self.state.outbox
        for row in rows:
            outbox.ended.append((row, "preempted", 0))
            outbox.released.append((row, 0))
            self.state.wake.set()
