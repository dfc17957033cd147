"""Flushes: the outbox becomes log, report and events."""

import asyncio
import logging
import time

from common.broker.client import ERRORS, describe_error
from common.messages.plan import Report
from gpu_worker.agent.outbox import Outbox
from gpu_worker.agent.publish import Publisher
from gpu_worker.agent.state import AgentState

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.1
RETRY_S = 0.05


class Flusher:
    """Publishes the outbox, one flush after the other.

    Attributes:
        reported_s: monotonic time of the last report.
    """

    def __init__(self, publisher: Publisher, state: AgentState) -> None:
        self.publisher = publisher
        self.state = state
        self.reported_s = 0.0

    async def run(self) -> None:
        """Flushes whenever something waits. Raises Sealed."""
        state = self.state
        while True:
            await state.wake.wait()
            state.wake.clear()
            await self.flush()
            if not state.table.rows and state.outbox.is_empty:
                state.idle.set()

    async def flush(self) -> None:
        """Publishes the outbox; what comes meanwhile goes with the next flush. Retries until the broker takes
        it. Raises Sealed.
        """
        state = self.state
        outbox, state.outbox = state.outbox, Outbox()
        if outbox.is_empty and not self.report_due():
            return
        flush = self.publisher.build(outbox, self.make_report(outbox), state.acknowledged, state.table.live)
        while True:
            try:
                await self.publisher.write(flush)
                return
            except ERRORS as error:
                log.warning(
                    "flush %d failed, trying again: %s", self.publisher.sequence, describe_error(error)
                )
                await asyncio.sleep(RETRY_S)

    def report_due(self) -> bool:
        """Whether the batcher must hear how far the rows are: the grant is half used, or time has passed."""
        state = self.state
        return bool(state.table.rows) and (
            state.step >= state.report_at_step or time.monotonic() - self.reported_s >= REPORT_INTERVAL_S
        )

    def make_report(self, outbox: Outbox) -> Report | None:
        """The report of a flush; None where the batcher needs none."""
        if not outbox.needs_report and not self.report_due():
            return None
        state = self.state
        self.reported_s = time.monotonic()
        if state.step >= state.report_at_step:
            state.report_at_step = state.until + 1
        return Report(
            sequence=self.publisher.sequence + 1,
            epoch=state.epoch,
            plan=state.plan,
            step=state.step,
            prefilled=outbox.prefilled,
            ended=outbox.ended,
            released=outbox.released,
            takeover=outbox.takeover,
        )
