"""Publisher: writes flushes (log, report, events, terminals, spills), each by one call of the script
`flush`.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.broker.client import SerialClient
from common.broker.heartbeat import TOKEN_COLUMNS_SINCE, WIRE_VERSION
from common.broker.lua import ScriptCall
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.events import ChannelSequences, Events, Terminal, terminal_for
from common.messages.plan import Report
from common.messages.records import RECORD
from common.metrics import catalogue
from gpu_worker import worker_scripts
from gpu_worker.agent.row_text import RowText, take_columns
from gpu_worker.agent.state import Outbox
from gpu_worker.worker_scripts import FlushedCount, FlushedPrompt, FlushedSpill, FlushedTerminal, FlushReply

SPILL_EVERY = 64
"""Number of flushes after which every live row is spilled and the log is trimmed: this bounds the log."""
SPILLED, HOLE = 1, 0
"""Answers of the script `flush` for a spill; any other number refuses it."""


class Sealed(Exception):
    """This incarnation has been declared dead: it may publish nothing more."""


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
    flushed: FlushedSpill

    @classmethod
    def of(cls, row: RowText, begin: int = 0) -> "Spill":
        """The tokens from index `begin` on, all by default."""
        request, offset = row.request, begin * RECORD.size * row.request.width
        records = bytes(row.records[offset:])
        flushed = FlushedSpill(request.request_id, row.attempt, row.base, offset, records, row.num_speculated)
        return cls(row, row.num_tokens, flushed)


@dataclass(slots=True)
class Flush:
    """One call of the script `flush`, after those that write logits; repeated calls change nothing.

    Attributes:
        logits: as in Outbox, those that are not written yet; they come before the tokens.
        messages: (channel, payload); the log gets the same payloads.
        counts: of live rows with new tokens whose API keys have budgets.
        mode: what the script does with the log.
        method: `prefill` where a prompt was computed, else `decode`.
    """

    sequence: int
    report: Report | None
    acknowledged: int
    messages: list[tuple[str, bytes]]
    prompts: list[FlushedPrompt]
    terminals: list[FlushedTerminal]
    spills: list[Spill]
    counts: list[FlushedCount]
    mode: str
    method: str
    logits: deque[tuple[RowText, int, bytes]] = field(default_factory=deque)


def check_reply(flush: Flush, reply: FlushReply) -> FlushReply:
    """Raises Sealed, StreamsGone or FlushesLost if a flush was not written."""
    if reply.status == "GAP":
        raise FlushesLost(f"flush {flush.sequence}")
    raise_refusal(reply.status)
    return reply


class Publisher:
    """Builds and writes the flushes of one incarnation, one after the other.

    Attributes:
        spill_due: the next flush spills all rows, since the broker lacks an earlier spill.
        resynced_at: number of the last flush that `resync` changed.
        wire_version: what all readers read.
    """

    def __init__(self, pool: PoolClient, incarnation: str) -> None:
        self.pool = pool
        self.keys = pool.keys
        self.incarnation = incarnation
        self.channels = ChannelSequences(incarnation)
        self.client = SerialClient(pool.redis)
        self.sequence = 0
        self.spill_due = False
        self.resynced_at = 0
        self.wire_version = WIRE_VERSION

    def set_wire_version(self, version: int) -> None:
        """Write what readers of a version read. If it is lower than before, the next flush moves all tokens
        from the log, where such a reader would not find them, to the requests' strings.
        """
        self.spill_due |= version < self.wire_version
        self.wire_version = version

    def build(self, outbox: Outbox, report: Report | None, acknowledged: int, live: list[RowText]) -> Flush:
        """Build the flush of an outbox. `report` has the flush's number; `live` rows may have to be
        spilled.
        """
        self.sequence += 1
        trim = self.spill_due or (self.sequence - self.resynced_at) % SPILL_EVERY == 0
        self.spill_due = False
        by_channel: defaultdict[str, list[RowText]] = defaultdict(list)
        for row in outbox.rows:
            by_channel[row.request.channel].append(row)
        return Flush(
            sequence=self.sequence,
            report=report,
            acknowledged=acknowledged,
            messages=[(channel, self.event(channel, rows)) for channel, rows in by_channel.items()],
            prompts=[
                FlushedPrompt(row.request.request_id, bytes(row.prompt or b"")) for row in outbox.prompts
            ],
            terminals=[self.terminal(row, why) for row, why in outbox.terminals],
            spills=[
                *map(Spill.of, outbox.interrupted),
                *(Spill.of(row, row.num_spilled) for row in live if trim),
            ],
            counts=[row.flushed_count for row in outbox.rows if row.has_budget and not row.ended],
            mode="trim" if trim else "",
            method="prefill" if outbox.prefilled else "decode",
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
            counts=flush.counts,
        )

    def event(self, channel: str, rows: Sequence[RowText], terminals: Sequence[Terminal] = ()) -> bytes:
        """The next message of a channel, with the new tokens of these rows; without a channel, of the log
        alone.
        """
        number = self.channels.next_number(channel, self.sequence) if channel else 0
        columns = take_columns(rows) if self.wire_version >= TOKEN_COLUMNS_SINCE else None
        tokens = [row.new_tokens() for row in rows if row.texts]
        return encode(Events(self.incarnation, number, tokens, [*terminals], self.sequence, columns))

    def terminal(self, row: RowText, why: str) -> FlushedTerminal:
        request, channel = row.request, row.request.channel
        end = terminal_for(request.request_id, why, row.num_tokens)
        return FlushedTerminal(
            request.request_id,
            attempt=row.attempt,
            base=row.base,
            end=end,
            records=bytes(row.records),
            ttl_ms=request.result_ttl_ms,
            channel=channel,
            payload=self.event(channel, [], [end]) if channel else b"",
            num_speculated=row.num_speculated,
        )

    async def write(self, flush: Flush) -> FlushReply:
        """Write a flush → what the broker says of its rows.

        Raises Sealed; StreamsGone; FlushesLost: the flush needs `resync`; or what the broker raises: the same
        flush may be written again.
        """
        started_s = time.perf_counter()
        reply = await self.client.run(self.call(flush))
        catalogue.BATCH_FILTER.observe(time.perf_counter() - started_s, flush.method)
        return check_reply(flush, reply)

    async def write_logits(self, row: RowText, place: int, values: bytes) -> int:
        """Write logits of the positions from `place` on, among those that the request returns → the reply of
        the script `write_logits`. Raises Sealed, StreamsGone, or what the broker raises.
        """
        request = row.request
        assert request.logits is not None
        call = worker_scripts.write_logits(
            self.keys,
            self.incarnation,
            request.request_id,
            attempt=row.attempt,
            base=row.base,
            place=place,
            num_rows=len(values) // request.logits.row_bytes,
            values=values,
            ttl_ms=request.ttl_ms + request.result_ttl_ms,
        )
        reply = await self.pool.run(call)
        if isinstance(reply, int):
            return reply
        raise StreamsGone if reply == "MISSING" else Sealed(reply)

    def start(self, flush: Flush, on_answer: Callable[[Any], None]) -> None:
        """Send a flush on the open connection; `on_answer` gets the answer for `take_answer`, perhaps not
        before `client.poll`.
        """
        started_s = time.perf_counter()
        self.client.start(on_answer, *self.call(flush).command)
        catalogue.BATCH_FILTER.observe(time.perf_counter() - started_s, flush.method)

    def take_answer(self, flush: Flush, answer: Any) -> FlushReply:
        """Take the broker's answer to a started flush. Returns and raises as `write` does."""
        if isinstance(answer, Exception):
            raise answer
        return check_reply(flush, worker_scripts.read_flush_reply(answer))

    def take_spilled(self, flush: Flush, spilled: Sequence[int]) -> list[RowText]:
        """Note which spills are written → rows whose requests do not belong to this worker any more: the
        request is gone, has ended, goes on elsewhere, or has other tokens.
        """
        refused = []
        for spill, result in zip(flush.spills, spilled, strict=True):
            if result == SPILLED:
                spill.row.num_spilled = spill.num_tokens
            elif result == HOLE:
                spill.row.num_spilled = 0
                self.spill_due = True
            else:
                refused.append(spill.row)
        return refused

    def resync(self, flush: Flush, report: Report, live: list[RowText]) -> None:
        """Make a flush follow any state of the broker: it spills all tokens of its own and of live rows."""
        rows = dict.fromkeys([*(spill.row for spill in flush.spills), *live])
        flush.report = report
        flush.spills = [Spill.of(row) for row in rows]
        flush.mode = "whole"
        self.resynced_at = flush.sequence  # so that the batcher has time to save the log before a trim
