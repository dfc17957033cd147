"""Housekeeping: what the active batcher does at intervals beside its turns: no request waits for it."""

import asyncio
import math
import time
from collections import Counter

from batcher.failure_detector import FailureDetector
from batcher.orphans import OrphanTracker
from batcher.scheduling.scheduler import Scheduler
from batcher.timeline import TimelineWriter
from batcher.worker_absence import WorkerAbsence
from batcher.workers import WorkerRegistry
from common.beats import until_beat
from common.broker import batcher_scripts
from common.broker.pool_client import PoolClient
from common.broker.sequences import REPEAT_S, SILENT_S, ChannelSequences
from common.messages.service_class import SERVICE_CLASSES
from common.process.heartbeat import Heartbeat
from common.settings.settings import Settings

STATE_TTL_MS = 60_000
POOL_TTL_S = 3600


class Housekeeping:
    """Cancels requests that nobody reads or nobody can serve, finds dead workers, trims `control`, publishes
    the state, writes timelines. A turn starts each run, so a loop that hangs shows no heartbeat.

    Attributes:
        tasks: the one that runs, or whose end no turn has seen; else none.
        due_s: monotonic time of the next run.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        pool: PoolClient,
        incarnation: str,
        scheduler: Scheduler,
        workers: WorkerRegistry,
        detector: FailureDetector,
        channels: ChannelSequences,
        timeline: TimelineWriter,
    ) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.workers = workers
        self.detector = detector
        self.channels = channels
        self.timeline = timeline
        self.tasks: set[asyncio.Task[list[str]]] = set()
        self.orphans = OrphanTracker(pool)
        self.absence = WorkerAbsence(pool, settings.worker_grace_s)
        self.heartbeat = Heartbeat(pool, "batcher", incarnation, settings.worker_ttl_s)
        self.interval_s = min(settings.heartbeat_s, REPEAT_S)
        self.due_s = 0.0

    @property
    def left_ms(self) -> int:
        """Milliseconds until the next run; 0 or less when it is due."""
        return math.ceil(1000 * (self.due_s - time.monotonic()))

    @property
    def wait_ms(self) -> int:
        """Milliseconds until there is something to start."""
        return min(self.left_ms, self.timeline.left_ms) if self.timeline.unwritten else self.left_ms

    def start(self, undecodable: int, control_id: str) -> None:
        """Start what is due, unless a task runs. Messages of `control` before `control_id` are done."""
        if not self.tasks and (self.timeline.is_due or self.left_ms <= 0):
            self.tasks.add(asyncio.create_task(self.run(undecodable, control_id)))

    def take_dead(self) -> list[str]:
        """Return the workers that must be sealed, once a task has found them. Raises what ended it."""
        done = {task for task in self.tasks if task.done()}
        self.tasks -= done
        return [incarnation for task in done for incarnation in task.result()]

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def run(self, undecodable: int, control_id: str) -> list[str]:
        """Do what is due. Return the workers that must be sealed."""
        await self.timeline.write()
        if self.left_ms > 0:
            return []
        self.due_s = time.monotonic() + until_beat(self.interval_s)
        orphans = await self.orphans.orphans(self.scheduler.sequences, self.scheduler.gateways)
        dead = await self.workers.check()  # after them: it looks whether the broker's clock has jumped
        if self.detector.active:
            for request_id in orphans:
                self.scheduler.cancel(request_id, "gateway")
            is_over_grace = await self.absence.is_over_grace(bool(self.scheduler.replicas))
            if is_over_grace and not self.scheduler.replicas:  # none has joined meanwhile
                self.end_waiting_clients()
        for channel, payload in self.channels.repeated_messages(SILENT_S):
            await self.pool.redis.publish(channel, payload)
        await self.publish_state(undecodable, control_id)
        return dead

    def end_waiting_clients(self) -> None:
        """End what gateways wait for, as there is no worker. Jobs wait for one until their deadline."""
        for sequence in list(self.scheduler.sequences.values()):
            if sequence.request.gateway:
                self.scheduler.cancel(sequence.request_id, "no_worker")

    async def publish_state(self, undecodable: int, control_id: str) -> None:
        """Trim `control`; write the scheduler's counts, the pool's place in the list of pools, and the
        heartbeat.
        """
        counts = count(self.scheduler) | {"undecodable": undecodable}
        # until then not all pools had time to renew theirs since the broker's clock jumped
        pool_ttl_s = POOL_TTL_S if self.detector.active else None
        await self.pool.run(
            batcher_scripts.publish_state(
                self.pool.keys,
                self.heartbeat.beat(waiting=counts["waiting"], rows=counts["rows"]),
                oldest=control_id,
                state_ttl_ms=STATE_TTL_MS,
                pool_ttl_s=pool_ttl_s,
                counts=counts,
            )
        )


def count(scheduler: Scheduler) -> dict[str, int]:
    """Numbers of workers, live requests, waiting requests, and rows and KV blocks on workers."""
    replicas = scheduler.replicas.values()
    waiting = Counter(sequence.class_index for sequence in scheduler.sequences.values() if sequence.waiting)
    return {
        "workers": len(replicas),
        "requests": len(scheduler.sequences),
        "waiting": waiting.total(),
        **{f"waiting_{name}": waiting[class_index] for class_index, name in enumerate(SERVICE_CLASSES)},
        "rows": sum(len(replica.rows) for replica in replicas),
        "blocks": sum(replica.pool.num_blocks - replica.pool.num_free for replica in replicas),
    }
