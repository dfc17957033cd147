"""Plans on their way from the batcher to the engine, with the bytes of the pictures that rows must see."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from redis.asyncio import Redis

from common.broker.client import FailureLog
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode
from common.messages.plan import NewRow, Plan
from common.metrics import catalogue
from common.process.startup import READY
from gpu_worker.agent.engine_client import EngineClient
from gpu_worker.agent.publish import Sealed
from gpu_worker.agent.state import AgentState
from gpu_worker.agent.steps import StepHandler

log = logging.getLogger(__name__)

RETRY_S = 0.05


BLOCK_MS = 5000
Entry = tuple[bytes, dict[bytes, bytes]]


@dataclass(eq=False)
class PlanStream:
    """Reads the stream of a worker's plans, in order. `last`: id of the last entry returned."""

    redis: Redis
    name: str
    last: bytes = b"0-0"
    failures: FailureLog = field(default_factory=lambda: FailureLog(log, "reading plans"))

    async def next(self) -> list[Entry]:
        """Return new entries, or none after a few seconds."""
        with self.failures.caught():
            reply = await self.redis.xread({self.name: self.last}, block=BLOCK_MS)
            entries: list[Entry] = reply[0][1] if reply else []
            self.last = entries[-1][0] if entries else self.last
            return entries
        await asyncio.sleep(RETRY_S)
        return []


@dataclass(eq=False)
class PlanHandler:
    """Sends the engine each plan, with what its rows need besides.

    Attributes:
        needs_all: rows need the pictures among cached tokens, too.
    """

    stream: PlanStream
    pool: PoolClient
    needs_all: bool
    engine: EngineClient
    state: AgentState
    steps: StepHandler
    failures: FailureLog = field(default_factory=lambda: FailureLog(log, "reading pictures"))

    async def run(self) -> None:
        """Apply plans as they come. Raises Sealed after one that cannot be read: it may have started rows,
        which go on elsewhere.
        """
        while True:
            for entry_id, fields in await self.stream.next():
                try:
                    plan = decode(Plan, fields[b"plan"])
                    self.apply(await self.with_pictures(plan))
                except (WireError, KeyError) as error:
                    catalogue.UNDECODABLE.add()
                    raise Sealed(f"plan {entry_id.decode()} cannot be read: {error}") from error

    async def with_pictures(self, plan: Plan) -> Plan:
        """The plan with the bytes of the pictures that its rows must see; one that the broker has lost is
        empty.
        """
        if not any(start.request.pictures for start in plan.starts):
            return plan
        contents = [await self.read_pictures(self.needed_by(start)) for start in plan.starts]
        starts = [replace(start, contents=own) for start, own in zip(plan.starts, contents, strict=True)]
        return replace(plan, starts=starts)

    def needed_by(self, start: NewRow) -> list[str]:
        """Digests of a row's pictures that its engine must see: those that have a token whose KV is not
        cached. Empty for the others.
        """
        num_cached = 0 if self.needs_all else start.num_cached
        return [
            one.digest if one.start + one.num_tokens > num_cached else "" for one in start.request.pictures
        ]

    async def read_pictures(self, digests: Sequence[str]) -> list[bytes]:
        """Read pictures in one round trip, however long the broker is away."""
        while any(digests):
            with self.failures.caught():
                found = await self.pool.redis.mget([self.pool.keys.picture(digest) for digest in digests])
                return [content or b"" for content in found]
            await asyncio.sleep(RETRY_S)
        return [b"" for _ in digests]

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
            if (row := state.rows.get(number)) is not None:
                row.blocks += blocks
        if starts:
            state.idle.clear()
        if state.report_clock.is_due(state.step):  # no step may come to wake the flusher
            state.wake.set()
        self.engine.send(replace(plan, starts=starts))
        for start in starts:
            self.steps.end_at_committed_stop_string(state.rows[start.row])
        self.return_unknown_rows(row for row, _ in plan.stops if row not in state.rows)

    def start_row(self, start: NewRow) -> NewRow | None:
        """Add a row to the table → what the engine starts; None if its request has failed."""
        row = self.state.start(start)
        needed = zip(self.needed_by(start), start.contents, strict=True)
        if any(digest and not content for digest, content in needed):
            self.steps.fail_at_start(row, "picture_gone")
            return None
        return start

    def return_unknown_rows(self, rows: Iterable[int]) -> None:
        """Report rows that the worker does not hold as preempted: then their requests go on elsewhere."""
        report = self.state.outbox.report
        for row in rows:
            report.ended.append((row, "preempted", 0))
            report.released.append((row, 0))
            self.state.wake.set()
