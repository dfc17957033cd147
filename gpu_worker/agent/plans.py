"""Plans, from the batcher to the engine: each becomes a grant."""

import asyncio
import logging
from collections.abc import Iterable

from common.broker.failures import FailureLog
from common.messages.codec import WireError, decode
from common.messages.packing import pack_ids
from common.messages.plan import NewRow, Plan
from common.messages.records import unpack_records
from common.messages.service_class import class_index
from common.metrics import catalogue
from common.process.readiness import READY
from gpu_worker.agent.engine_client import EngineClient
from gpu_worker.agent.plan_stream import Entry, PlanStream
from gpu_worker.agent.state import AgentState
from gpu_worker.agent.steps import StepHandler
from gpu_worker.protocol import StartRow

log = logging.getLogger(__name__)

RETRY_S = 0.05


class PlanHandler:
    """Reads the stream of plans and sends the engine what they grant."""

    def __init__(
        self, stream: PlanStream, engine: EngineClient, state: AgentState, steps: StepHandler
    ) -> None:
        self.stream = stream
        self.engine = engine
        self.state = state
        self.steps = steps
        self.failures = FailureLog(log, "reading plans")

    async def run(self) -> None:
        """Apply plans as they come. A plan that cannot be read is counted and skipped."""
        try:
            while True:
                for entry_id, fields in await self.next_entries():
                    try:
                        self.apply(decode(Plan, fields[b"plan"]))
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
        """Send the engine the plan's grant."""
        state = self.state
        state.plan = plan
        if plan.takeover:
            READY.set()
            state.answer_takeover()
            return
        state.granted = plan
        state.until = max(state.until, plan.until)
        state.report_clock.grant(plan.report_at or (state.step + state.until + 1) // 2)
        starts = [self.start_row(start) for start in plan.starts]
        for number, blocks in plan.blocks:
            if (row := state.table.rows.get(number)) is not None:
                row.blocks += blocks
        if starts:
            state.idle.clear()
        if state.report_clock.is_due(state.step):  # no other step may come to wake the flusher
            state.wake.set()
        self.engine.send(state.grant(starts, plan.blocks, plan.stops))
        for start in plan.starts:
            self.steps.end_at_committed_stop_string(state.table.rows[start.row])
        self.return_unknown_rows(row for row, _ in plan.stops if row not in state.table.rows)

    def start_row(self, start: NewRow) -> StartRow:
        """Add a row to the table → what the engine starts."""
        row = self.state.table.start(start)
        request = row.request
        committed_ids, _, _ = unpack_records(start.committed, request.width)
        return StartRow(
            row=start.row,
            ids=request.prompt_ids + pack_ids(committed_ids),
            base=start.base,
            blocks=start.blocks,
            stopping=request.stopping,
            sampling=request.sampling,
            top_n_tokens=request.top_n_tokens,
            prompt_logprobs=None if row.prompt is None else request.prompt_logprobs,
            num_cached=start.num_cached,
            class_index=class_index(request.class_name),
        )

    def return_unknown_rows(self, rows: Iterable[int]) -> None:
        """Report rows that are not here as preempted, so that their requests go on elsewhere: the plan that
        started them could not be read, or they are long released.
        """
        outbox = self.state.outbox
        for row in rows:
            outbox.ended.append((row, "preempted", 0))
            outbox.released.append((row, 0))
            self.state.wake.set()
