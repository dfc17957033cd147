"""Flusher: decides when the outbox is published, and retries until the broker has taken it.

A flush costs the broker, the agent and the gateway about the same whether it has one token or ten. So while
few rows decode in short steps, a flush waits for the tokens of a second step.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from common.broker.client import ERRORS, FailureLog
from common.messages.plan import Report
from gpu_worker.agent.publish import Flush, FlushesLost, Publisher
from gpu_worker.agent.row_text import RowText
from gpu_worker.agent.state import AgentState, Outbox
from gpu_worker.worker_scripts import LOGITS_LOST, LOGITS_REFUSED, FlushReply

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
RETRY_S = 0.05
MAX_STEPS_OF_FLUSH = 2
MAX_WAIT_S = 0.005
"""A client does not notice that a token comes this much later."""
SHORT_STEP_MS = 1000 * MAX_WAIT_S
FEW_ROWS = 8


def may_wait(outbox: Outbox, num_rows: int, step_ms: float) -> bool:
    """Whether a flush of the outbox may wait for the tokens of another step, while steps take `step_ms`. What
    needs a report, as first tokens and ends do, does not wait.
    """
    return (
        0 < outbox.num_steps < MAX_STEPS_OF_FLUSH
        and not outbox.needs_report
        and num_rows <= FEW_ROWS
        and 0 < step_ms <= SHORT_STEP_MS
    )


class Flusher:
    """Publishes the outbox, one flush after the other.

    While the engine runs step after step, a flush is started in the call that brings the step, and its answer
    is taken in the call that brings the next one: so this process wakes once a step. The task `run` does all
    else.

    Attributes:
        drop: stops rows whose requests do not belong to this worker any more.
        cut: ends rows whose API keys have reached their budgets.
        compute_again: preempts rows whose first logits the broker has lost.
        block_size: tokens of a KV block.
        reported_s: monotonic time of the last report.
        rests: whether the task waits for `wake`.
        started: the flush that was started with a step and has no answer yet.
        failed: a started flush and the error that answered it; the task retries it.
        answered: set when `started` has its answer.
    """

    def __init__(
        self,
        publisher: Publisher,
        state: AgentState,
        drop: Callable[[Iterable[RowText]], None],
        cut: Callable[[], None],
        compute_again: Callable[[Iterable[RowText]], None],
        block_size: int,
    ) -> None:
        self.publisher = publisher
        self.state = state
        self.drop = drop
        self.cut = cut
        self.compute_again = compute_again
        self.block_size = block_size
        self.reported_s = 0.0
        self.rests = False
        self.started: Flush | None = None
        self.failed: tuple[Flush, Exception] | None = None
        self.answered = asyncio.Event()
        self.failures = FailureLog(log, "a flush")

    async def run(self) -> None:
        """Flush whenever something waits. Raises Sealed, StreamsGone."""
        state = self.state
        while True:
            self.rests = True
            await state.wake.wait()
            self.rests = False
            state.wake.clear()
            if self.may_wait:
                await self.wait_for_step()
            await self.flush()
            if not state.table.rows and state.outbox.is_empty:
                state.idle.set()

    @property
    def may_wait(self) -> bool:
        """Whether the next flush may wait for a step that the engine has been granted."""
        state = self.state
        return (
            may_wait(state.outbox, len(state.table.rows), state.step_ms)
            and state.step < state.granted.until
            and not self.report_due()
            and not state.budgets.num_rows
        )

    async def wait_for_step(self) -> None:
        """Wait until there is more to flush, for at most MAX_WAIT_S."""
        wake = self.state.wake
        timer = asyncio.get_running_loop().call_later(MAX_WAIT_S, wake.set)
        await wake.wait()
        timer.cancel()
        wake.clear()

    # --- in the call that brings a step ---------------------------------------------------------------------

    def flush_step(self) -> None:
        """Publish what a step has brought: at once if the flush before has its answer and another step will
        come, else by the task.
        """
        self.poll()
        if not self.can_start or self.may_wait:
            self.state.wake.set()
        elif (flush := self.build()) is not None:
            self.started = flush
            self.publisher.start(flush, self.on_answer)

    @property
    def can_start(self) -> bool:
        state = self.state
        return (
            self.rests
            and not state.wake.is_set()
            and self.started is None
            and bool(state.table.rows)
            and state.step < state.granted.until
            and self.publisher.client.is_connected
            and not state.outbox.logits
        )

    def poll(self) -> None:
        """Take the answer of the started flush if it has come; a later one is taken when it comes."""
        if self.started is not None:
            self.publisher.client.poll()

    def on_answer(self, answer: Any) -> None:
        flush, self.started = self.started, None
        assert flush is not None
        self.answered.set()
        try:
            self.take(flush, self.publisher.take_answer(flush, answer))
        except Exception as error:
            self.failed = flush, error
            self.state.wake.set()

    # --- in the task ----------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Publish the outbox; retry until the broker takes it. If the broker has lost flushes, every row is
        sent again. Raises Sealed, StreamsGone.
        """
        self.answered.clear()
        self.poll()
        if self.started is not None:
            await self.answered.wait()
        if self.failed is not None:
            (flush, error), self.failed = self.failed, None
            await self.prepare_again(flush, error)
            await self.write(flush)
        if (flush_or_none := self.build()) is not None:
            await self.write(flush_or_none)

    async def write(self, flush: Flush) -> None:
        while True:
            try:
                if flush.logits:
                    await self.write_logits(flush)
                self.take(flush, await self.publisher.write(flush))
                self.failures.succeeded()
                return
            except (FlushesLost, *ERRORS) as error:
                await self.prepare_again(flush, error)

    def take(self, flush: Flush, reply: FlushReply) -> None:
        """Take what the broker says of the rows of a flush that is written."""
        num_spills = len(flush.spills)
        self.state.budgets.note(flush.counts, reply.results[num_spills:])
        self.drop(self.publisher.take_spilled(flush, reply.results[:num_spills]))

    async def write_logits(self, flush: Flush) -> None:
        """Write the logits of a flush, which come before its tokens."""
        while flush.logits:
            row, *piece = flush.logits[0]
            reply = await self.publisher.write_logits(row, *piece)
            flush.logits.popleft()
            if reply == LOGITS_LOST:
                self.compute_again([row])
            elif reply == LOGITS_REFUSED:
                self.drop([row])

    async def prepare_again(self, flush: Flush, error: Exception) -> None:
        """Prepare to write a flush again after this error. Raises the error if a retry cannot help."""
        if isinstance(error, FlushesLost):
            log.warning("the broker has lost what came before %s: all rows are sent again", error)
            self.resync(flush)
        elif isinstance(error, ERRORS):
            self.failures.failed(error)
            await asyncio.sleep(RETRY_S)
        else:
            raise error

    def build(self) -> Flush | None:
        """Take the outbox → its flush; None if there is nothing to publish."""
        state = self.state
        report_due = self.report_due()
        if state.outbox.is_empty and not report_due:
            return None
        self.cut()
        outbox, state.outbox = state.outbox, Outbox()
        needs_report = outbox.needs_report or report_due
        report = self.make_report(outbox, self.publisher.sequence + 1) if needs_report else None
        return self.publisher.build(outbox, report, state.plan.acknowledged, state.table.live)

    def resync(self, flush: Flush) -> None:
        """Add every token of every row to a flush, and tell the batcher that reports are lost."""
        state = self.state
        for row in state.table.rows.values():
            row.num_spilled = 0
        report = flush.report or self.make_report(Outbox(), flush.sequence)
        self.publisher.resync(flush, replace(report, reports_lost=True), state.table.live)

    def report_due(self) -> bool:
        """Whether the batcher must learn how far the rows are: the report clock says so, a row that is ahead
        needs blocks, or the last report is REPORT_INTERVAL_S old.
        """
        state = self.state
        return bool(state.table.rows) and (
            state.report_clock.is_due(state.step)
            or time.monotonic() - self.reported_s >= REPORT_INTERVAL_S
            or state.runs_short(self.block_size)
        )

    def make_report(self, outbox: Outbox, sequence: int) -> Report:
        """The report of the flush with this number."""
        state = self.state
        self.reported_s = time.monotonic()
        lengths = state.take_lengths()
        return Report(
            sequence=sequence,
            epoch=state.plan.epoch,
            plan=state.plan.number,
            step=state.step,
            prefilled=outbox.prefilled,
            ended=outbox.ended,
            released=outbox.released,
            takeover=outbox.takeover,
            held=[row.held for row in state.table.rows.values()] if outbox.takeover else [],
            last_row=state.table.last_row,
            hashes=outbox.hashes,
            snapshots=outbox.snapshots,
            step_times=state.take_step_times(),
            lengths=lengths,
            round_trips=state.report_clock.on_report(state.step),
        )
