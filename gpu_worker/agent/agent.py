"""The agent: plans in, tokens out. It knows Redis and text; the engine, behind the door, knows neither."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable

from redis.asyncio import Redis

from common.broker.client import ERRORS, describe_error, script
from common.broker.keys import STREAMS_TTL_MS, Keys
from common.broker.sequences import REPEAT_S
from common.messages.codec import WireError, decode
from common.messages.finish_reasons import INTERRUPTED
from common.messages.packing import pack_ids
from common.messages.plan import Plan, Report, RowStart, WorkerCapacity
from common.messages.records import unpack_records
from common.metrics import catalogue
from common.settings.settings import Settings
from gpu_worker.agent.engine_client import EngineClient
from gpu_worker.agent.heartbeat import WorkerHeartbeat
from gpu_worker.agent.outbox import Outbox
from gpu_worker.agent.publish import Publisher
from gpu_worker.agent.row_text import RowTable, RowText
from gpu_worker.agent.watchdog import Watchdog
from gpu_worker.protocol import Grant, StartRow, StepResult

log = logging.getLogger(__name__)

TICK_S = 0.1
RETRY_S = 0.05


class Agent:
    """One incarnation of a worker.

    Attributes:
        step: the last step that the engine completed.
        num_tokens: tokens sampled in this incarnation's life.
        until: the last step granted; at `tick_at` the batcher is told how far we are, so that the next grant
            comes in time.
        draining: no rows are wanted any more.
        idle: whether nothing is held and everything is published.
    """

    def __init__(
        self, settings: Settings, redis: Redis, engine: EngineClient, table: RowTable, worker: WorkerCapacity
    ) -> None:
        self.settings, self.redis, self.engine, self.table, self.worker = (
            settings,
            redis,
            engine,
            table,
            worker,
        )
        self.keys = Keys(settings.pool)
        self.publisher = Publisher(redis, self.keys, worker.incarnation)
        self.announcer = WorkerHeartbeat(redis, self.keys, settings, worker)
        self.outbox = Outbox()
        self.wake = asyncio.Event()
        self.epoch = self.plan = self.acknowledged = 0
        self.step = self.until = self.tick_at = self.num_tokens = 0
        self.prefill_tokens = 0
        self.takeover_pending = False
        self.reported_at = 0.0
        self.watch = Watchdog(self)
        self.draining = asyncio.Event()
        self.announce_now = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    async def run(self) -> None:
        """Serves until drained. Raises Sealed, EngineDied or EngineStuck when this incarnation is over before
        that.
        """
        await self.open()
        verbs = [
            self.follow_plans(),
            self.follow_steps(),
            self.flush_for_ever(),
            self.announce_for_ever(),
            self.watch.look_for_ever(),
            self.drain(),
        ]
        tasks = [asyncio.create_task(verb) for verb in verbs]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        self.publisher.line.close()
        for task in done:
            task.result()

    async def open(self) -> None:
        """Creates our streams; nothing is heard or said before that."""
        opening = script(self.redis, "create_logs")
        keys = [self.keys.log(self.worker.incarnation), self.keys.reports(self.worker.incarnation)]
        while True:
            try:
                await opening(keys=keys, args=[self.worker.incarnation, STREAMS_TTL_MS])
                return
            except ERRORS as error:
                log.warning("open: %s", describe_error(error))
                await asyncio.sleep(RETRY_S)

    # Plans, from the batcher to the engine.

    async def follow_plans(self) -> None:
        stream, after = self.keys.plans(self.worker.incarnation), "0"
        while True:
            try:
                answer = await self.redis.xread({stream: after}, block=5000)
            except ERRORS as error:
                log.warning("plans: %s", describe_error(error))
                await asyncio.sleep(RETRY_S)
                continue
            for entry_id, fields in answer[0][1] if answer else []:
                after = entry_id.decode()
                try:
                    self.apply(decode(Plan, fields[b"plan"]))
                except (WireError, KeyError) as error:
                    catalogue.UNDECODABLE.add()
                    log.error("plan %s cannot be read: %s", after, error)

    def apply(self, plan: Plan) -> None:
        """Hands a plan on to the engine."""
        self.epoch, self.plan, self.acknowledged = plan.epoch, plan.number, plan.acknowledged
        if plan.takeover:
            self.drop_everything()
            return
        self.until, self.prefill_tokens = max(self.until, plan.until), plan.prefill_tokens
        self.tick_at = (self.step + self.until + 1) // 2
        if not self.table.rows:
            self.watch.moved()
        starts = [self.start(start) for start in plan.starts]
        if starts:
            self.idle.clear()
        self.engine.send(Grant(self.until, self.prefill_tokens, starts, plan.blocks, plan.stops))
        self.disown(row for row, _ in plan.stops if row not in self.table.rows)

    def disown(self, rows: Iterable[int]) -> None:
        """Answers for rows that are not here, for their plan could not be read (or they are long released):
        their requests go on.
        """
        for row in rows:
            self.outbox.ended.append((row, "preempted", 0))
            self.outbox.released.append((row, 0))
            self.wake.set()

    def start(self, start: RowStart) -> StartRow:
        row = self.table.start(start)
        request = row.request
        shown_ids, _, _ = unpack_records(start.committed, request.width)
        return StartRow(
            row=start.row,
            ids=request.prompt_ids + pack_ids(shown_ids),
            base=start.base,
            blocks=start.blocks,
            stopping=request.stopping,
            sampling=request.sampling,
            top_n_tokens=request.top_n_tokens,
            prompt_logprobs=None if row.prompt is None else request.prompt_logprobs,
        )

    def drop_everything(self) -> None:
        """A new batcher: every row ends here, and goes on when that batcher says where."""
        self.takeover_pending = True
        if self.table.rows:
            self.stop(list(self.table.rows), "takeover")
        else:
            self.answer_takeover()

    def answer_takeover(self) -> None:
        self.takeover_pending = False
        self.outbox.takeover = True
        self.wake.set()

    # Steps, from the engine to everybody.

    async def follow_steps(self) -> None:
        while True:
            for step in await self.engine.steps():
                self.take_in(step)
            self.watch.moved()
            self.wake.set()

    def take_in(self, step: StepResult) -> None:
        """Moves rows on by one step."""
        self.step = step.step
        self.num_tokens += step.num_samples
        rows, tops = self.table.rows, {place: top for place, *top in step.top_logprobs}
        for place, (number, _, token_id, logprob) in enumerate(step.sampled):
            if (row := rows.get(number)) is not None and not row.ended:
                if not row.texts:
                    self.outbox.rows.append(row)
                if row.stopped_by(row.add(token_id, logprob, tops.get(place))):
                    self.stop_at_string(row, step)
        for number, first, *told in step.prompt_logprobs:
            if (row := rows.get(number)) is not None:
                row.add_prompt(first, *told)
        for number, kv_len in step.prefilled:
            self.outbox.prefilled.append((number, kv_len, step.step))
            if (row := rows.get(number)) is not None and row.prompt is not None:
                self.outbox.prompts.append(row)
        for number, why, end in step.ended:
            if (row := rows.get(number)) is not None and not row.ended:
                self.end(row, why, end)
        for number, kv_len in step.released:
            rows.pop(number, None)
            self.outbox.released.append((number, kv_len))
        if self.takeover_pending and not rows:
            self.answer_takeover()

    def stop_at_string(self, row: RowText, step: StepResult) -> None:
        """Ends a row whose text has a stop string, unless this very token ends it anyway for a reason that
        comes first.
        """
        if any(number == row.row for number, _, _ in step.ended):
            return
        self.end(row, "stop_sequence", row.num_tokens)
        self.stop([row.row], "stop_sequence")

    def stop(self, rows: list[int], why: str) -> None:
        self.engine.send(Grant(self.until, self.prefill_tokens, stops=[(row, why) for row in rows]))

    def end(self, row: RowText, why: str, end: int) -> None:
        row.ended = True
        self.outbox.ended.append((row.row, why, end))
        if why in INTERRUPTED:
            self.outbox.interrupted.append(row)
        else:
            self.outbox.terminals.append((row, why))

    # Flushes: log, report and events.

    async def flush_for_ever(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            await self.flush()
            if not self.table.rows and self.outbox.empty:
                self.idle.set()

    async def flush(self) -> None:
        """Publishes what has gathered; what gathers meanwhile goes with the next flush."""
        outbox, self.outbox = self.outbox, Outbox()
        if outbox.empty and not self.tick_due():
            return None
        flush = self.publisher.build(outbox, self.report(outbox), self.acknowledged, self.table.live)
        while True:
            try:
                return await self.publisher.write(flush)
            except ERRORS as error:
                log.warning("flush %d: %s", self.publisher.sequence, describe_error(error))
                await asyncio.sleep(RETRY_S)

    def tick_due(self) -> bool:
        return bool(self.table.rows) and (
            self.step >= self.tick_at or time.monotonic() - self.reported_at >= TICK_S
        )

    def report(self, outbox: Outbox) -> Report | None:
        """The report of a flush, when the batcher must hear something, or has heard nothing for a while."""
        if not outbox.has_news and not self.tick_due():
            return None
        self.reported_at = time.monotonic()
        self.tick_at = self.until + 1 if self.step >= self.tick_at else self.tick_at
        return Report(
            sequence=self.publisher.sequence + 1,
            epoch=self.epoch,
            plan=self.plan,
            step=self.step,
            prefilled=outbox.prefilled,
            ended=outbox.ended,
            released=outbox.released,
            takeover=outbox.takeover,
        )

    # Signs of life, and the end.

    async def announce_for_ever(self) -> None:
        while True:
            try:
                await self.announce()
                for channel, payload in self.publisher.channels.repeated_messages():
                    await self.redis.publish(channel, payload)
            except ERRORS as error:
                log.warning("announce: %s", describe_error(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.announce_now.wait(), min(REPEAT_S, self.settings.heartbeat_s))
            self.announce_now.clear()

    async def announce(self) -> None:
        state = "draining" if self.draining.is_set() else "ready"
        await self.announcer.announce(state, self.step, self.table, self.num_tokens)

    async def drain(self) -> None:
        """After SIGTERM: the batcher takes our rows elsewhere; then we are done."""
        await self.draining.wait()
        log.info("draining: %d rows", len(self.table.rows))
        self.announce_now.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), self.settings.graceful_termination_timeout)
