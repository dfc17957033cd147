"""Steps on their way from the engine to the outbox: tokens become text, rows end, blocks are released.
And the watchdog, which ends the worker when its engine hangs.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from common.messages.events import BUDGET, INTERRUPTED
from common.process.event_loop import run_until_one_ends, until_beat
from gpu_worker.agent.engine_client import EngineClient
from gpu_worker.agent.row_text import RowText
from gpu_worker.agent.state import AgentState
from gpu_worker.protocol import StepResult

log = logging.getLogger(__name__)


CHECK_INTERVAL_S = 1.0
MAX_COUNTED_S = 2.0
"""The longest time that one check counts. After a longer one, this process was stopped or waited for a core,
and has not read yet what the engine sent.
"""
MIN_SHARE = 0.1
"""At least this share of the time counts, however starved the engine is: so a busy loop is found in the
end.
"""


class EngineStuck(Exception):
    """The engine holds rows and may run, or has a command, but has completed nothing for too long."""


@dataclass(eq=False)
class Watchdog:
    """Raises EngineStuck after `timeout_s()` busy seconds without a `reset`. Time in which the engine's
    threads waited for a core does not count: on a loaded machine a step may take a hundred times as long, and
    a restart would make it longer still.

    Attributes:
        run_delay_s: how long the engine's threads have waited for a core since they started.
        stuck_s: seconds counted since the last reset.
        checked_s, delay_s: monotonic time of the last check, and `run_delay_s()` then.
    """

    timeout_s: Callable[[], float]
    is_busy: Callable[[], bool]
    run_delay_s: Callable[[], float]
    stuck_s: float = 0.0
    checked_s: float = field(default_factory=lambda: time.monotonic())
    delay_s: float = 0.0

    def reset(self) -> None:
        self.stuck_s = 0.0

    async def run(self) -> None:
        """Check once a second. Raises EngineStuck."""
        while True:
            await asyncio.sleep(until_beat(CHECK_INTERVAL_S))
            self.check()

    def check(self) -> None:
        """Raises EngineStuck."""
        now_s, delay_s = time.monotonic(), self.run_delay_s()
        elapsed_s = min(now_s - self.checked_s, MAX_COUNTED_S)
        starved_s = min(delay_s - self.delay_s, (1 - MIN_SHARE) * elapsed_s)
        self.checked_s = now_s
        self.delay_s = delay_s
        self.stuck_s = self.stuck_s + elapsed_s - max(0.0, starved_s) if self.is_busy() else 0.0
        if self.stuck_s > self.timeout_s():
            raise EngineStuck(f"no step and no answer for {self.stuck_s:.0f} s (STEP_TIMEOUT_S)")


@dataclass(eq=False)
class StepHandler:
    """Adds what each completed step brings to the rows and to the outbox. With `prefix_caching` the batcher
    learns what the blocks of released rows hold.
    """

    engine: EngineClient
    state: AgentState
    prefix_caching: bool

    async def run(self, watchdog: Watchdog, publish: Callable[[], None]) -> None:
        """Apply steps as they come; `publish` is called after them. Never returns; raises EngineDied."""

        def handle(steps: Sequence[StepResult]) -> None:
            self.handle(steps, watchdog)
            publish()

        await self.engine.run_steps(handle)

    def handle(self, steps: Sequence[StepResult], watchdog: Watchdog) -> None:
        started_s = time.perf_counter()
        for step in steps:
            self.apply(step)
        self.engine.metrics.on_steps(steps, time.perf_counter() - started_s)
        watchdog.reset()

    async def stop_all(self, watchdog: Watchdog) -> None:
        """Have the engine stop every row; return when it has released them all. Raises EngineDied."""
        state, released = self.state, asyncio.Event()

        def handle(steps: Sequence[StepResult]) -> None:
            self.handle(steps, watchdog)
            if not state.rows:
                released.set()

        stops = [(row, "preempted") for row in state.rows]
        self.engine.send(replace(state.granted, stops=stops))
        if state.rows:
            await run_until_one_ends(self.engine.run_steps(handle), released.wait())

    def apply(self, step: StepResult) -> None:
        """Add what a step brought to the rows and to the outbox."""
        state = self.state
        state.step = step.step
        state.report_clock.on_step(step.step)
        state.num_tokens += step.num_samples + step.num_beams
        state.add_time(step)
        self.add_logits(step)
        self.add_tokens(step)
        self.add_prompts(step)
        state.outbox.report.snapshots.extend(step.snapshots)
        rows = state.rows
        for number, records in step.sequences:
            if (row := rows.get(number)) is not None and not row.ended:
                row.set_sequences(records)
        for number, why, end in step.ended:
            if (row := rows.get(number)) is not None and not row.ended:
                self.finish_row(row, why, end)
        for number, kv_len in step.released:
            state.outbox.report.released.append((number, kv_len))
            row = rows.pop(number, None)
            state.ahead.pop(number, None)
            if row is not None and self.prefix_caching and (hashes := row.generated_hashes(kv_len)):
                state.outbox.report.hashes.append((number, hashes))
        if not rows:
            state.report_clock.stop_waiting()

    def add_logits(self, step: StepResult) -> None:
        """Add the logits of rows that have not ended: those after the end belong to no token."""
        for number, first, values in step.logits:
            row = self.state.rows.get(number)
            if row is not None and not row.ended and (logits := row.request.logits):
                place = first - logits.first_position(len(row.prompt_ids))
                self.state.outbox.logits.append((row, place, values))

    def add_tokens(self, step: StepResult) -> None:
        rows, outbox = self.state.rows, self.state.outbox
        top_logprobs = {place: top for place, *top in step.top_logprobs}
        previous = 0
        for place, (number, _, token_id, logprob) in enumerate(step.sampled):
            if (row := rows.get(number)) is not None and not row.ended:
                if not row.texts:
                    outbox.rows.append(row)
                if number == previous:
                    self.state.ahead[number] = row
                    row.speculated.append(row.num_tokens)
                previous = number
                text = row.add(token_id, logprob, top_logprobs.get(place))
                if row.matcher is not None and row.matches_stop_string(text):
                    self.end_at_stop_string(row, step)

    def add_prompts(self, step: StepResult) -> None:
        rows, outbox = self.state.rows, self.state.outbox
        for number, first, *logprobs in step.prompt_logprobs:
            if (row := rows.get(number)) is not None:
                row.add_prompt(first, *logprobs)
        for number, kv_len in step.prefilled:
            outbox.report.prefilled.append((number, kv_len, step.step))
            if (row := rows.get(number)) is not None:
                row.kv_len = kv_len
                row.at_step = step.step
                if row.prompt is not None:
                    outbox.prompts.append(row)

    def end_at_stop_string(self, row: RowText, step: StepResult) -> None:
        """End a row whose text has a stop string, unless the engine ends it at the same token."""
        if (row.row, row.num_tokens) not in ((number, end) for number, _, end in step.ended):
            self.end_early(row, "stop_sequence")

    def end_at_committed_stop_string(self, row: RowText) -> None:
        """End a row that started with its whole answer: the broker had lost the end. If the last token ends
        it for another reason, the engine reports that.
        """
        has_stop_string = row.matcher is not None and row.matcher.matched
        if has_stop_string and row.num_tokens < row.request.stopping.max_new_tokens:
            self.end_early(row, "stop_sequence")

    def fail_at_start(self, row: RowText, why: str) -> None:
        """End a row that the engine never gets."""
        log.error("request %s fails: %s", row.request.request_id, why)
        self.finish_row(row, why, row.num_tokens)
        self.state.rows.pop(row.row)
        self.state.outbox.report.released.append((row.row, 0))
        self.state.wake.set()

    def drop(self, rows: Iterable[RowText]) -> None:
        """End rows whose requests do not belong to this worker any more; the batcher decides what becomes of
        them.
        """
        for row in (row for row in rows if not row.ended):
            log.warning("request %s is dropped: the broker knows of another run", row.request.request_id)
            row.ended = True
            self.state.outbox.report.ended.append((row.row, "preempted", row.num_tokens))
            self.stop(row, "preempted")
            self.state.wake.set()

    def compute_again(self, rows: Iterable[RowText]) -> None:
        """Preempt rows whose first logits the broker has lost: their next attempt computes all of them."""
        for row in (row for row in rows if not row.ended):
            log.warning("request %s starts again: the broker has lost its logits", row.request.request_id)
            self.end_early(row, "preempted")

    def cut_at_budgets(self) -> None:
        """End rows that have more unpublished tokens than their API keys may still get, without these."""
        outbox = self.state.outbox
        for row, kept in self.state.take_rows_to_cut():
            row.drop_unpublished(len(row.texts) - kept)
            if row.ended:
                outbox.end_earlier(row, BUDGET)
            else:
                self.end_early(row, BUDGET)

    def stop(self, row: RowText, why: str) -> None:
        """Have the engine stop a row, since it has ended for the client."""
        self.engine.send(replace(self.state.granted, stops=[(row.row, why)]))

    def end_early(self, row: RowText, why: str) -> None:
        """End a row that the engine still computes."""
        self.finish_row(row, why, row.num_tokens)
        self.stop(row, why)
        self.state.wake.set()

    def finish_row(self, row: RowText, why: str, end: int) -> None:
        """End a row for the client: with a terminal, or with a spill if its request goes on elsewhere."""
        row.ended = True
        outbox = self.state.outbox
        outbox.report.ended.append((row.row, why, end))
        if why in INTERRUPTED:
            outbox.interrupted.append(row)
        else:
            outbox.terminals.append((row, why))
