"""Flushes (log, report, events, terminals, spills): each is written by one call of the script `flush`. The
flusher decides when the outbox is published, and retries until the broker has taken it.
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from common.broker.client import ERRORS, FailureLog, SerialClient
from common.broker.lua import ScriptCall
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.events import ChannelSequences, Events, Terminal, terminal_for
from common.messages.plan import Report
from common.messages.records import RECORD
from common.metrics import catalogue
from gpu_worker import worker_scripts
from gpu_worker.agent.row_text import RowText, take_columns
from gpu_worker.agent.state import AgentState, Outbox
from gpu_worker.agent.steps import StepHandler
from gpu_worker.worker_scripts import (
    LOGITS_LOST,
    LOGITS_REFUSED,
    FlushedRow,
    FlushReply,
    ended,
)

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
RETRY_S = 0.05
SPILL_EVERY = 64
"""Number of flushes after which every live row is spilled and the log is trimmed: this bounds the log."""
SPILLED, HOLE = 1, 0
"""Answers of the script `flush` for a spill; any other number refuses it."""


class Sealed(Exception):
    """This incarnation is over: it has been declared dead, or has a plan that cannot be read."""


class StreamsGone(Exception):
    """The streams of this incarnation are gone: the broker has lost them, or the incarnation was declared
    dead and removed.
    """


def raise_refusal(answer: str) -> None:
    """Raises StreamsGone or Sealed if a script's answer refuses this incarnation."""
    if answer == "MISSING":
        raise StreamsGone
    if answer != "OK":
        raise Sealed(answer)


class FlushesLost(Exception):
    """The broker does not have the flush before this one: it was restored from an older state."""


class Spill(NamedTuple):
    """Tokens of a row that a flush writes into the request's own string; `num_tokens` are in it then."""

    row: RowText
    num_tokens: int
    flushed: FlushedRow

    @classmethod
    def of(cls, row: RowText, begin: int = 0) -> "Spill":
        """The tokens from index `begin` on, all by default."""
        offset = begin * RECORD.size * row.request.width
        return cls(row, row.num_tokens, row.flushed(offset, bytes(row.records[offset:])))


@dataclass(slots=True)
class Flush:
    """One call of the script `flush`, after those that write logits; repeated calls change nothing.

    Attributes:
        logits: as in Outbox, those that are not written yet; they come before the tokens.
        messages: (channel, payload); the log gets the same payloads.
        prompts: (request, records) of the prompt's tokens.
        counts: (API key, count) of live rows with new tokens whose keys have budgets.
        mode: what the script does with the log.
        method: `prefill` where a prompt was computed, else `decode`.
    """

    sequence: int
    report: Report | None
    acknowledged: int
    messages: list[tuple[str, bytes]]
    prompts: list[tuple[str, bytes]]
    terminals: list[FlushedRow]
    spills: list[Spill]
    counts: list[tuple[str, FlushedRow]]
    mode: str
    method: str
    logits: deque[tuple[RowText, int, bytes]] = field(default_factory=deque)


class Flusher:
    """Publishes the outbox of one incarnation, one flush after the other.

    While the engine runs step after step, a flush is started in the call that brings the step, and its answer
    is taken in the call that brings the next one: so this process wakes once a step. The task `run` does all
    else.

    Attributes:
        block_size: tokens of a KV block.
        sequence: number of the last flush that was built.
        spill_due: the next flush spills all rows, since the broker lacks an earlier spill.
        resynced_at: number of the last flush that was sent whole.
        reported_s: monotonic time of the last report.
        rests: whether the task waits for `wake`.
        started: the flush that was started with a step and has no answer yet.
        failed: a started flush and the error that answered it; the task retries it.
        answered: set when `started` has its answer.
    """

    def __init__(
        self, pool: PoolClient, incarnation: str, state: AgentState, steps: StepHandler, block_size: int
    ) -> None:
        self.pool = pool
        self.keys = pool.keys
        self.incarnation = incarnation
        self.state = state
        self.steps = steps
        self.block_size = block_size
        self.channels = ChannelSequences(incarnation)
        self.client = SerialClient(pool.redis)
        self.sequence = 0
        self.spill_due = False
        self.resynced_at = 0
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
            await self.flush()
            if not state.rows and state.outbox.is_empty:
                state.idle.set()

    # --- in the call that brings a step ---------------------------------------------------------------------

    def flush_step(self) -> None:
        """Publish what steps have brought: at once if the flush before has its answer and another step will
        come, else by the task.
        """
        self.poll()
        if not self.can_start:
            self.state.wake.set()
        elif (flush := self.build()) is not None:
            self.started = flush
            started_s = time.perf_counter()
            self.client.start(self.on_answer, *self.call(flush).command)
            catalogue.BATCH_FILTER.observe(time.perf_counter() - started_s, flush.method)

    @property
    def can_start(self) -> bool:
        state = self.state
        return (
            self.rests
            and not state.wake.is_set()
            and self.started is None
            and bool(state.rows)
            and state.step < state.granted.until
            and self.client.is_connected
            and not state.outbox.logits
        )

    def poll(self) -> None:
        """Take the answer of the started flush if it has come; a later one is taken when it comes."""
        if self.started is not None:
            self.client.poll()

    def on_answer(self, answer: Any) -> None:
        flush, self.started = self.started, None
        assert flush is not None
        self.answered.set()
        try:
            if isinstance(answer, Exception):
                raise answer
            self.take(flush, worker_scripts.read_flush_reply(answer))
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
        """Write a flush, however often that takes. Raises Sealed, StreamsGone."""
        while True:
            try:
                if flush.logits:
                    await self.write_logits(flush)
                started_s = time.perf_counter()
                reply = await self.client.run(self.call(flush))
                catalogue.BATCH_FILTER.observe(time.perf_counter() - started_s, flush.method)
                self.take(flush, reply)
                self.failures.succeeded()
                return
            except (FlushesLost, *ERRORS) as error:
                await self.prepare_again(flush, error)

    def take(self, flush: Flush, reply: FlushReply) -> None:
        """Take what the broker says of a flush and its rows. A row whose spill it refuses is dropped: the
        request is gone, has ended, goes on elsewhere, or has other tokens. Raises Sealed, StreamsGone or
        FlushesLost if the flush was not written.
        """
        if reply.status == "GAP":
            raise FlushesLost(f"flush {flush.sequence}")
        raise_refusal(reply.status)
        num_spills = len(flush.spills)
        if flush.counts:
            self.state.note_left([key_id for key_id, _ in flush.counts], reply.results[num_spills:])
        for spill, result in zip(flush.spills, reply.results[:num_spills], strict=True):
            if result == SPILLED:
                spill.row.num_spilled = spill.num_tokens
            elif result == HOLE:
                spill.row.num_spilled = 0
                self.spill_due = True
            else:
                self.steps.drop([spill.row])

    async def write_logits(self, flush: Flush) -> None:
        """Write the logits of a flush, which come before its tokens. Raises Sealed, StreamsGone, or what the
        broker raises.
        """
        while flush.logits:
            row, place, values = flush.logits[0]
            request = row.request
            assert request.logits is not None
            piece = row.flushed(place, len(values) // request.logits.row_bytes, values)
            ttl_ms = request.ttl_ms + request.kept_ms
            reply = await self.pool.run(
                worker_scripts.write_logits(self.keys, self.incarnation, piece, ttl_ms=ttl_ms)
            )
            if isinstance(reply, str):
                raise_refusal(reply)
            flush.logits.popleft()
            if reply == LOGITS_LOST:
                self.steps.compute_again([row])
            elif reply == LOGITS_REFUSED:
                self.steps.drop([row])

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

    # --- what a flush has -----------------------------------------------------------------------------------

    def build(self) -> Flush | None:
        """Take the outbox → its flush; None if there is nothing to publish."""
        state = self.state
        report_due = self.report_due()
        if state.outbox.is_empty and not report_due:
            return None
        self.steps.cut_at_budgets()
        outbox, self.sequence = state.outbox, self.sequence + 1
        needs_report = outbox.needs_report or report_due
        state.outbox = Outbox() if needs_report else Outbox(report=outbox.report)
        report = self.make_report(outbox, self.sequence) if needs_report else None
        trim = self.spill_due or (self.sequence - self.resynced_at) % SPILL_EVERY == 0
        self.spill_due = False
        by_channel: defaultdict[str, list[RowText]] = defaultdict(list)
        for row in outbox.rows:
            by_channel[row.request.channel].append(row)
        return Flush(
            sequence=self.sequence,
            report=report,
            acknowledged=state.plan.acknowledged,
            messages=[(channel, self.event(channel, rows)) for channel, rows in by_channel.items()],
            prompts=[(row.request.request_id, bytes(row.prompt or b"")) for row in outbox.prompts],
            terminals=[self.terminal(row, why) for row, why in outbox.terminals],
            spills=[
                *map(Spill.of, outbox.interrupted),
                *(Spill.of(row, row.num_spilled) for row in state.live if trim),
            ],
            counts=[
                (row.request.key_id, row.flushed(row.num_tokens))
                for row in outbox.rows
                if row.has_budget and not row.ended
            ],
            mode="trim" if trim else "",
            method="prefill" if outbox.report.prefilled else "decode",
            logits=deque(outbox.logits),
        )

    def call(self, flush: Flush) -> ScriptCall[FlushReply]:
        return worker_scripts.flush(
            self.keys,
            self.incarnation,
            sequence=flush.sequence,
            report=encode(flush.report) if flush.report else b"",
            acknowledged=flush.acknowledged,
            mode=flush.mode,
            messages=flush.messages,
            prompts=flush.prompts,
            terminals=flush.terminals,
            spills=[spill.flushed for spill in flush.spills],
            counts=[count for _, count in flush.counts],
        )

    def event(self, channel: str, rows: Sequence[RowText], terminals: Sequence[Terminal] = ()) -> bytes:
        """The next message of a channel, with the new tokens of these rows; without a channel, of the log
        alone.
        """
        number = self.channels.next_number(channel, self.sequence) if channel else 0
        columns = take_columns(rows)
        tokens = [row.new_tokens() for row in rows if row.texts]
        return encode(Events(self.incarnation, number, tokens, [*terminals], self.sequence, columns))

    def terminal(self, row: RowText, why: str) -> FlushedRow:
        request, channel = row.request, row.request.channel
        end = terminal_for(request.request_id, why, row.num_tokens)
        payload = self.event(channel, [], [end]) if channel else b""
        records = bytes(row.records)
        return row.flushed(*ended(end, records, request.kept_ms, channel, payload, row.num_used))

    def resync(self, flush: Flush) -> None:
        """Make a flush follow any state of the broker: it spills all tokens of its own and of live rows, and
        tells the batcher that reports are lost.
        """
        state = self.state
        for row in state.rows.values():
            row.num_spilled = 0
        report = flush.report or self.make_report(Outbox(), flush.sequence)
        flush.report = replace(report, reports_lost=True)
        rows = dict.fromkeys([*(spill.row for spill in flush.spills), *state.live])
        flush.spills = [Spill.of(row) for row in rows]
        flush.mode = "whole"
        # the batcher has time to save the log before a trim
        self.resynced_at = flush.sequence

    def report_due(self) -> bool:
        """Whether the batcher must learn how far the rows are: the report clock says so, a row that is ahead
        needs blocks, or the last report is REPORT_INTERVAL_S old.
        """
        state = self.state
        return bool(state.rows) and (
            state.report_clock.is_due(state.step)
            or time.monotonic() - self.reported_s >= REPORT_INTERVAL_S
            or state.runs_short(self.block_size)
        )

    def make_report(self, outbox: Outbox, sequence: int) -> Report:
        """The report of the flush with this number."""
        state = self.state
        self.reported_s = time.monotonic()
        lengths = state.take_lengths(self.block_size)
        return replace(
            outbox.report,
            sequence=sequence,
            epoch=state.plan.epoch,
            plan=state.plan.number,
            step=state.step,
            held=[row.held for row in state.rows.values()] if outbox.report.takeover else [],
            last_row=state.last_row,
            step_times=state.take_step_times(),
            lengths=lengths,
            round_trips=state.report_clock.on_report(state.step),
        )
