"""The state that the plans, steps and flushes of one incarnation share; with key budgets: what the API keys
of running requests may still get this month, and which rows must end because of it.

Whatever is published is counted, and the broker's answer says how much is left. So between two answers a
worker publishes no more than was left at the first of them.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tokenizers import Tokenizer

from common.messages.events import INTERRUPTED
from common.messages.plan import NewRow, Plan, Report
from common.messages.records import unpack_ids
from gpu_worker.agent.engine_adapters import EngineAdapters
from gpu_worker.agent.row_text import RowText
from gpu_worker.protocol import StepResult


@dataclass(slots=True)
class Outbox:
    """What the next flush publishes.

    Attributes:
        rows: those that have new tokens.
        prompts: rows whose prompt's log-probabilities are published, all of them; this flush has the rows'
            first token.
        logits: (row, place, values) of rows that return some: `place` is that of the first position among
            those that the request returns.
        terminals: (row, why) of rows whose request ends here.
        interrupted: rows whose requests go on elsewhere; their tokens must be spilled.
        report: what the next report says of rows and blocks.
    """

    rows: list[RowText] = field(default_factory=list)
    prompts: list[RowText] = field(default_factory=list)
    logits: list[tuple[RowText, int, bytes]] = field(default_factory=list)
    terminals: list[tuple[RowText, str]] = field(default_factory=list)
    interrupted: list[RowText] = field(default_factory=list)
    report: Report = field(default_factory=lambda: Report(0, 0, 0, 0))

    def end_earlier(self, row: RowText, why: str) -> None:
        """A row that has ended lost its last tokens: its request ends for this reason, unless it goes on."""
        self.terminals = [(one, why if one is row else reason) for one, reason in self.terminals]
        self.report.ended[:] = [
            (number, why if reason not in INTERRUPTED else reason, row.num_tokens)
            if number == row.row
            else (number, reason, end)
            for number, reason, end in self.report.ended
        ]

    @property
    def needs_report(self) -> bool:
        """Whether the batcher must learn of it."""
        report = self.report
        return bool(report.prefilled or report.ended or report.released or report.takeover)

    @property
    def is_empty(self) -> bool:
        return not (self.rows or self.terminals or self.logits or self.needs_report)


@dataclass(slots=True)
class ReportClock:
    """Tells when a report is due, so that the next grant comes in time, and how long that grant takes.

    Attributes:
        due_step: a report is due once this step is completed.
        reported_step: the last step that a report had.
        due_s: monotonic time at which the unanswered report was due; 0 while none is unanswered.
        round_trips: ms from `due_s` to each grant that came since the last report.
    """

    due_step: int = 0
    reported_step: int = 0
    due_s: float = 0.0
    round_trips: list[float] = field(default_factory=list)

    def is_due(self, step: int) -> bool:
        return step >= self.due_step > self.reported_step

    def on_step(self, step: int) -> None:
        """The engine has completed a step."""
        if self.is_due(step) and not self.due_s:
            self.due_s = time.monotonic()

    def on_report(self, step: int) -> list[float]:
        """A report says that this step is completed → the round trips for the report."""
        self.reported_step = step
        trips, self.round_trips = self.round_trips, []
        return trips

    def on_grant(self, due_step: int) -> None:
        """The engine has a grant; the next report is due at `due_step`."""
        if self.due_s and due_step > self.due_step:
            self.round_trips.append((time.monotonic() - self.due_s) * 1e3)
            self.due_s = 0.0
        self.due_step = due_step

    def stop_waiting(self) -> None:
        """Stop the measurement: no row is held, or a new batcher asks first which rows are."""
        self.due_s = 0.0


NO_PLAN = Plan(epoch=0, number=0, until=0, prefill_tokens=0)


@dataclass(slots=True)
class AgentState:
    """The state of one incarnation.

    Attributes:
        rows: by number, from their start until the engine releases them.
        last_row: the highest number that a row ever had.
        num_known: tokens that rows started with, those of earlier attempts included.
        num_cached: how many of these had their KV in blocks already.
        draining: the worker takes no more rows and ends once it holds none.
        leaving: the worker takes no more rows, since it is to serve another model.
        signalled: a signal asked the worker to end within GRACEFUL_TERMINATION_TIMEOUT.
        outbox: what the next flush publishes; `wake` says that there is something.
        plan: the newest plan.
        granted: what stays granted by it, or by the one before a takeover: its steps, no rows.
        step: the last one that the engine completed.
        report_clock: when a report is due.
        num_tokens: tokens sampled in this incarnation's life.
        ahead: rows that got several tokens in one step since the last report, by number.
        left: tokens that API keys with budgets may still get, by the last answer. It is forgotten with the
            flush after the key's last row has ended.
        adapters: those that the engine has loaded, and those that it has refused.
        step_times: (whether rows decode, whether prompts are computed) → number of such steps since the last
            report, their prompt tokens, their ms.
        idle: whether no row is held and everything is published.
    """

    tokenizer: Tokenizer
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    signalled: asyncio.Event = field(default_factory=asyncio.Event)
    rows: dict[int, RowText] = field(default_factory=dict)
    last_row: int = 0
    num_known: int = 0
    num_cached: int = 0
    outbox: Outbox = field(default_factory=Outbox)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    plan: Plan = NO_PLAN
    granted: Plan = NO_PLAN
    step: int = 0
    report_clock: ReportClock = field(default_factory=ReportClock)
    num_tokens: int = 0
    ahead: dict[int, RowText] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    adapters: EngineAdapters = field(default_factory=EngineAdapters)
    step_times: dict[tuple[bool, bool], tuple[int, int, float]] = field(default_factory=dict)

    def start(self, start: NewRow) -> RowText:
        """Add a row."""
        row = self.rows[start.row] = RowText.of(start, self.tokenizer)
        self.last_row = max(self.last_row, start.row)
        self.num_known += len(row.prompt_ids) + start.base
        self.num_cached += start.num_cached
        return row

    @property
    def live(self) -> list[RowText]:
        return [row for row in self.rows.values() if not row.ended]

    @property
    def budget_keys(self) -> set[str]:
        """The API keys with budgets of live rows."""
        return {row.request.key_id for row in self.rows.values() if row.has_budget and not row.ended}

    def note_left(self, key_ids: Iterable[str], left: Iterable[int]) -> None:
        """Note what the answer to a flush says is left for the key of each request that it counted."""
        known = self.budget_keys
        self.left |= {key_id: number for key_id, number in zip(key_ids, left, strict=True) if key_id in known}

    def take_rows_to_cut(self) -> list[tuple[RowText, int]]:
        """Return rows that have more unpublished tokens than their keys may still get, and how many of these
        tokens each keeps. The first token of an answer was set aside at its admission.
        """
        if not self.left:
            return []
        left, cut = self.left, []
        for row in self.outbox.rows:
            number = left.get(row.request.key_id) if row.has_budget else None
            if number is not None:
                own = int(len(row.texts) == row.num_tokens)
                kept = min(len(row.texts), own + max(number, 0))
                left[row.request.key_id] = number - (kept - own)
                if kept < len(row.texts):
                    cut.append((row, kept))
        known = self.budget_keys
        self.left = {key_id: number for key_id, number in left.items() if key_id in known}
        return cut

    def num_blocks(self, block_size: int) -> int:
        """Count the KV blocks that hold tokens of any row; rows may share blocks. Of a beam search all count:
        its beams take them as they need them.
        """
        filled: set[int] = set()
        for row in self.rows.values():
            num_filled = -(-(len(row.prompt_ids) + row.num_tokens) // block_size)
            filled.update(unpack_ids(row.blocks)[: None if row.request.beams else num_filled])
        return len(filled)

    def add_time(self, step: StepResult) -> None:
        """Add the duration of a step to the next report."""
        if step.duration_ms:
            decodes = step.num_beams > 0 or step.num_samples > len(step.prefilled)
            kind = decodes, step.prefill_tokens > 0
            steps, tokens, ms = self.step_times.get(kind, (0, 0, 0.0))
            self.step_times[kind] = steps + 1, tokens + step.prefill_tokens, ms + step.duration_ms

    def take_step_times(self) -> list[tuple[int, int, int, float]]:
        """Return `Report.step_times` since the last call; steps without prefill come first."""
        times, self.step_times = self.step_times, {}
        in_order = sorted(times.items(), key=lambda item: item[0][1])
        return [(steps, steps * decodes, tokens, ms) for (decodes, _), (steps, tokens, ms) in in_order]

    def runs_short(self, block_size: int) -> bool:
        """Whether the blocks of a row that is ahead may be full after half of the steps granted."""
        steps_left = self.granted.until - self.step
        return any(2 * row.slots_left(block_size) <= steps_left for row in self.ahead.values())

    def take_lengths(self, block_size: int) -> list[tuple[int, int, int]]:
        """Return `Report.lengths`: how long the rows are that are ahead, or have missed a block's steps."""
        rows, self.ahead = self.ahead, {}
        for row in self.live:
            missed = row.kv_len + self.step - row.at_step - row.kv_now
            if row.kv_len and row.request.beams is None and missed >= block_size:
                rows[row.row] = row
        for row in rows.values():
            row.kv_len, row.at_step = row.kv_now, self.step
        return [(row.row, row.kv_len, row.at_step) for row in rows.values() if not row.ended]

    def next_incarnation(self) -> "AgentState":
        """The state of the next incarnation, whose engine is the same and holds no row. Numbers of rows and
        steps go on, and so does the grant.
        """
        return AgentState(
            self.tokenizer,
            self.draining,
            signalled=self.signalled,
            last_row=self.last_row,
            step=self.step,
            granted=self.granted,
            adapters=self.adapters,
        )

    def answer_takeover(self) -> None:
        """Answer a new batcher with the next report. Rows go on."""
        self.report_clock.stop_waiting()
        self.outbox.report = replace(self.outbox.report, takeover=True)
        self.wake.set()
