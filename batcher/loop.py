"""Batcher: the loop of the active batcher. It reads entries, updates the scheduler and publishes plans."""

import asyncio
import logging
from functools import partial
from typing import Any, NoReturn

from batcher import batcher_scripts, inbox
from batcher.actions import Action, ActionQueue, ScriptAction
from batcher.housekeeping import Housekeeping
from batcher.inbox import Inbox, StreamEntry
from batcher.lease import Lease, LeaseLost, WritesLost
from batcher.recovery import Recovery
from batcher.scheduling.plan_builder import PendingPlan
from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from batcher.timeline import TimelineWriter
from batcher.worker_registry import FailureDetector, WorkerRegistry
from common.broker.client import FailureLog
from common.broker.lua import ScriptCall
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode
from common.messages.events import ChannelSequences
from common.messages.plan import Report, WorkerDied
from common.messages.request import Cancel, Resume
from common.metrics import catalogue
from common.settings.settings import Settings

log = logging.getLogger(__name__)

ENTRIES_S = 0.02
"""The longest time that one turn spends on entries."""
RETRY_S = 0.2


class Batcher:
    """One epoch of the active batcher.

    Attributes:
        requests: the key of the stream, which each entry's is compared with.
        pending: what is decided and not done yet.
        undecodable: number of entries that could not be read.
    """

    def __init__(self, settings: Settings, pool: PoolClient, lease: Lease, epoch: int) -> None:
        self.keys = pool.keys
        self.requests = pool.keys.requests
        self.lease = lease
        self.epoch = epoch
        self.channels = ChannelSequences(f"{lease.holder}-{epoch}")
        self.scheduler = Scheduler(WorkerLimits.read(settings), epoch, settings.weights)
        self.inbox = Inbox(pool.redis)
        self.detector = FailureDetector(settings.worker_ttl_s)
        self.timeline = TimelineWriter(pool, self.detector.now_ms)
        self.workers = WorkerRegistry(pool, self.inbox, self.scheduler, self.detector)
        self.pending = ActionQueue(pool.redis)
        shared = self.scheduler, self.workers, self.channels, self.timeline
        self.recovery = Recovery(pool, self.pending, *shared)
        self.housekeeping = Housekeeping(settings, pool, lease.holder, *shared, lease.clock.now_ms)
        self.undecodable = 0
        self.failures = FailureLog(log, "a turn")

    async def run(self) -> NoReturn:
        """Run the epoch. Raises LeaseLost when another batcher took over, WritesLost."""
        await self.retry(self.start_epoch)
        while True:
            await self.retry(self.turn)

    async def retry(self, action: Action) -> None:
        """Repeat `action` until the broker does not fail it."""
        while True:
            with self.failures.caught():
                await action()
                return
            self.detector.pause()
            await asyncio.sleep(RETRY_S)

    async def start_epoch(self) -> None:
        """Take all workers over, and read the requests from before this epoch."""
        await self.workers.start_epoch()
        await self.recovery.read_control()
        self.inbox.follow(self.keys.control, self.recovery.control_id)
        await self.recovery.read_requests(self.on_entry)
        self.inbox.follow(self.requests, self.recovery.last_id)  # after `control`: cancels need their request
        self.timeline.traces.note_former(self.scheduler.sequences.values())
        self.pending.defer(self.timeline.traces.recall)
        self.recovery.settle()
        log.info("active, epoch %d; workers: %d", self.epoch, len(self.workers.workers))

    async def turn(self) -> None:
        """Run the pending actions that wait for no reply, handle the entries that have come, and decide."""
        await self.lease.confirm()
        self.inbox.read_ahead(self.scheduler.left_ms(self.lease.clock.now_ms(), self.housekeeping.wait_ms))
        acted = await self.run_pending()
        dead = self.housekeeping.take_dead()
        for one in dead:
            why = "it does not answer" if one in self.workers.lost else "no heartbeat"
            self.pending.add(partial(self.recovery.seal, one, why))
        self.housekeeping.start(self.undecodable, self.inbox.done_id(self.keys.control))
        waits = not (acted or self.pending.can_run)  # requests that an action has resumed are placed first
        await self.inbox.fill(waits, self.housekeeping.tasks, self.pending.due)
        for entry in self.inbox.pop_entries(ENTRIES_S):
            self.on_entry(entry)
        self.scheduler.expire(self.lease.clock.now_ms())
        self.decide()

    def close(self) -> None:
        self.pending.close()
        self.inbox.close()
        self.housekeeping.close()

    async def run_pending(self) -> bool:
        """Take the replies that have come, and run all actions that wait for none. Return whether one of them
        was no script.
        """
        acted = False
        self.pending.take_replies()
        self.pending.queue_deferred()
        while self.pending.can_run:
            await self.lease.confirm()
            acted |= await self.pending.run_next()
        return acted

    def on_entry(self, entry: StreamEntry) -> None:
        """Handle one entry. One that cannot be read is counted and skipped."""
        try:
            if entry.stream == self.requests:
                self.on_request(entry)
            elif entry.stream == self.keys.control:
                self.on_control(entry)
            else:
                self.on_worker_entry(entry)
        except (WireError, UnicodeDecodeError) as error:
            self.undecodable += 1
            catalogue.UNDECODABLE.add()
            log.error("%s of %s cannot be read: %s", entry.id, entry.stream, error)
            if entry.stream == self.requests:
                self.pending.add(partial(self.recovery.finish_undecodable, entry))

    def on_request(self, entry: StreamEntry) -> None:
        if entry.kind != "generate":
            raise WireError(f"unknown kind {entry.kind!r}")
        now_ms = self.lease.clock.now_ms()
        is_new = self.requests in self.inbox.last_ids
        sequence = inbox.parse_sequence(entry, now_ms if is_new else inbox.parse_queued_ms(entry, now_ms))
        if (known := self.scheduler.sequences.get(sequence.request_id)) is not None:
            is_same = known.request.digest == sequence.request.digest
            if is_same and known not in self.scheduler.outcomes.finished:
                self.pending.add(partial(self.recovery.replace_entry, known, entry))
                return
            self.pending.add(partial(self.recovery.delete_entry, "", known.entry_id))
            self.scheduler.forget(known)  # it has ended: its id was asked for again
        self.scheduler.register(sequence)
        if is_new and sequence.request.num_shown:
            self.pending.defer(partial(self.recovery.restore, [sequence]))
        elif is_new:
            self.timeline.record_queued(sequence)
            self.scheduler.enqueue(sequence)
            if not self.scheduler.replicas:
                self.housekeeping.hurry()
        else:
            self.recovery.unread.append(sequence)

    def on_control(self, entry: StreamEntry) -> None:
        match entry.kind:
            case "cancel":
                cancel = decode(Cancel, entry.data)
                self.scheduler.cancel(cancel.request_id, cancel.why)
            case "resume":
                self.scheduler.restart(decode(Resume, entry.data).request_id)
            case "worker_ready":
                self.pending.add(partial(self.workers.send_takeover, entry.data.decode()))
            case "died":
                died = decode(WorkerDied, entry.data)
                self.pending.add(partial(self.recovery.seal_process, died.incarnation))
            case other:
                raise WireError(f"unknown kind {other!r}")

    def on_worker_entry(self, entry: StreamEntry) -> None:
        incarnation = entry.stream.removeprefix(self.keys.reports(""))
        match entry.kind:
            case "report":
                report = inbox.parse_report(entry.data, incarnation, self.epoch)
                if (replica := self.scheduler.replicas.get(incarnation)) is not None:
                    self.timeline.record_report(replica, report)
                self.on_report(incarnation, report)
            case "sealed":
                self.inbox.unfollow(entry.stream)
                self.recovery.remove(incarnation)
            case "open":
                pass
            case other:
                raise WireError(f"unknown kind {other!r}")

    def on_report(self, incarnation: str, report: Report) -> None:
        if incarnation in self.scheduler.replicas:
            self.scheduler.apply_report(incarnation, report)
        elif self.workers.answers_takeover(incarnation, report):
            try:
                self.recovery.on_takeover_report(incarnation, report)
            except ValueError as error:
                self.pending.add(
                    partial(self.recovery.seal, incarnation, f"its report contradicts itself: {error}")
                )

    def decide(self) -> None:
        """Enqueue the scheduler's plans and outcomes."""
        self.pending.add(*map(self.publication, self.scheduler.plans()))
        outcomes = self.scheduler.pop_outcomes()
        self.recovery.dequeue(outcomes.finished)
        for sequence, why in outcomes.to_finish:
            self.pending.add(partial(self.recovery.finish, sequence, why))
        if outcomes.interrupted:
            self.pending.add(partial(self.recovery.resume, outcomes.interrupted))

    def publication(self, plan: PendingPlan) -> ScriptAction:
        def call() -> ScriptCall[Any]:
            replica = plan.replica
            oldest = min(replica.plan_seen, replica.plan_written)  # the script looks for the plan before
            worker = replica.capacity.incarnation
            return batcher_scripts.publish_plan(self.keys, worker, plan=plan.plan, oldest=oldest)

        return ScriptAction(call, partial(self.on_published, plan))

    def on_published(self, plan: PendingPlan, reply: list[Any]) -> list[ScriptAction]:
        """Take the reply to a plan. Rows whose request is cancelled or has ended are withdrawn, and the plan
        is published again; so are later plans, which the broker refuses without it.
        """
        replica, incarnation = plan.replica, plan.replica.capacity.incarnation
        match batcher_scripts.read_plan_reply(reply):
            case "OK", _:
                replica.plan_written = plan.plan.number
                self.timeline.record_plan(plan)
            case "GAP", _:
                if replica.plan_written >= plan.plan.number - 1:
                    raise WritesLost(f"the broker lost plans of worker {incarnation}")
                return [self.publication(plan)]
            case "refused", positions if self.scheduler.replicas.get(incarnation) is replica:
                for row in self.scheduler.withdraw(plan, positions):
                    why = row.sequence.stop_reason or "client"
                    self.pending.add(partial(self.recovery.finish, row.sequence, why))
                return [self.publication(plan)]
            case "FENCED", _:
                raise LeaseLost(f"worker {incarnation} has a plan of a newer epoch")
            case "MISSING", _:
                self.pending.add(partial(self.recovery.seal, incarnation, "its logs are gone"))
        return []
