"""Housekeeping: what the active batcher does at intervals beside its turns. No request waits for it.

An orphan is a request whose gateway died: it goes on for its grace period, then it is cancelled. The active
batcher knows all live requests, so it also says when a LoRA adapter that was unloaded may go.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import InitVar, dataclass, field, replace

from batcher import batcher_scripts
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from batcher.timeline import TimelineWriter
from batcher.worker_registry import Since, WorkerRegistry
from common.adapter_registry import AdapterRegistry, change_registry, read_newer
from common.adapters import LEAVING, LOADING, READY, AdapterLoad, HeldAdapters, adapter_name
from common.broker.heartbeat import Heartbeat
from common.broker.keys import ADAPTERS_TTL_MS
from common.broker.pool_client import ChangeRefused, PoolClient
from common.messages.codec import encode
from common.messages.events import REPEAT_S, SILENT_S, ChannelSequences
from common.messages.request import SERVICE_CLASSES
from common.process.event_loop import until_beat
from common.settings.settings import Settings

log = logging.getLogger(__name__)

LINGER_S = 3.0
"""An adapter that nobody uses is kept for this time: a gateway may not know yet that it was unloaded."""
LOAD_TIMEOUT_S = 900.0
"""An adapter that is still loaded after this time is taken back: its gateway has died."""


@dataclass(eq=False)
class AdapterKeeper:
    """Forgets adapters that were unloaded, and finds requests whose adapter is gone.

    Attributes:
        registry: as it was read last.
        waiting: key and state of each adapter that waits for its end: it is being loaded, or no request uses
            it any more.
    """

    pool: PoolClient
    registry: AdapterRegistry = field(default_factory=AdapterRegistry)
    waiting: Since[tuple[str, str]] = field(default_factory=Since)

    @property
    def names(self) -> list[str]:
        """The names of the adapters that requests may name."""
        return [one.name for one in self.registry.ready]

    async def look(self, scheduler: Scheduler, holders: Collection[HeldAdapters]) -> list[str]:
        """Forget what is due, and return the ids of requests that no worker will ever compute: they wait, and
        no worker has their adapter or will load it. `holders`: what those have that serve adapters.
        """
        found = await read_newer(self.pool, self.registry)
        if not found.version:
            return []  # a gateway writes it again
        await self.pool.redis.pexpire(self.pool.keys.adapters, ADAPTERS_TTL_MS)
        self.registry = found
        sequences = scheduler.sequences.values()
        used = {sequence.request.adapter for sequence in sequences} - {""}
        if gone := self.overdue(used):
            log.info("adapters that are gone: %s", ", ".join(gone))
            with contextlib.suppress(ChangeRefused):  # others change it all the time
                self.registry = await change_registry(self.pool, lambda found: without_all(found, gone))
        hopeless = {key for key in used if not self.may_be_served(key, holders)}
        return [one.request_id for one in sequences if one.waiting and one.request.adapter in hopeless]

    def may_be_served(self, key: str, holders: Collection[HeldAdapters]) -> bool:
        """Whether a worker has this adapter, or may load it: none does once all refuse it."""
        if any(key in held.loaded for held in holders):
            return True
        adapter = self.registry.adapters.get(key)
        if adapter is None or adapter.failure:
            return False
        return not holders or not all(held.why_not(adapter) for held in holders)

    def overdue(self, used: Collection[str]) -> list[str]:
        """Return the keys of adapters that have waited for their end for long enough."""
        self.waiting.look(
            (key, one.state)
            for key, one in self.registry.adapters.items()
            if one.state == LOADING or (one.state == LEAVING and key not in used)
        )
        linger_s = {LEAVING: LINGER_S, LOADING: LOAD_TIMEOUT_S}
        return [
            key
            for key, state in self.waiting.since_s
            if self.waiting.lasts_s((key, state)) >= linger_s[state]
        ]


def without_all(found: AdapterRegistry, gone: Collection[str]) -> AdapterRegistry:
    """Return the registry without these adapters, unless they have been loaded again meanwhile."""
    kept = {key: one for key, one in found.adapters.items() if key not in gone or one.state == READY}
    return replace(found, adapters=kept)


STATE_TTL_MS = 60_000
HURRY_S = 0.05
"""Least time between two runs."""


@dataclass(eq=False)
class OrphanTracker:
    """Finds orphans.

    Attributes:
        absent: gateways without a heartbeat.
        moved: request id → the gateway through which its client came back.
    """

    pool: PoolClient
    absent: Since[str] = field(default_factory=Since)
    moved: dict[str, str] = field(default_factory=dict)

    async def orphans(self, live: Mapping[str, Sequence], gateways: Collection[str]) -> list[str]:
        """Return the ids of the live requests whose gateway has been absent for longer than they go on.
        `gateways` are those that sent them. While none is absent, no request is looked at.
        """
        self.moved = {name: gateway for name, gateway in self.moved.items() if name in live}
        names = sorted({*gateways, *self.moved.values()} - {""})
        async with self.pool.redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.exists(self.pool.keys.gateway(name))
            present = await pipe.execute()
        self.absent.look(name for name, exists in zip(names, present, strict=True) if not exists)
        overdue = [
            sequence
            for sequence in (live.values() if self.absent.since_s else ())
            if (gateway := self.gateway(sequence)) in self.absent.since_s
            and self.absent.lasts_s(gateway) * 1000 >= sequence.request.goes_on_ms
        ]
        moved = await self.find_moved(overdue)
        self.moved |= moved
        return [sequence.request_id for sequence in overdue if sequence.request_id not in moved]

    def gateway(self, sequence: Sequence) -> str:
        return self.moved.get(sequence.request_id, sequence.request.gateway)

    async def find_moved(self, sequences: Collection[Sequence]) -> dict[str, str]:
        """Return the requests that have moved to another gateway, by their hash in Redis."""
        async with self.pool.redis.pipeline(transaction=False) as pipe:
            for sequence in sequences:
                pipe.hget(self.pool.keys.request(sequence.request_id), "gateway")
            found = await pipe.execute(raise_on_error=False)
        return {
            sequence.request_id: gateway.decode()
            for sequence, gateway in zip(sequences, found, strict=True)
            if isinstance(gateway, bytes) and gateway.decode() != self.gateway(sequence)
        }


@dataclass(eq=False)
class Housekeeping:
    """Cancels requests that nobody reads or nobody can serve, finds dead workers, trims `control`, publishes
    the state, writes timelines. A turn starts each run, so a loop that hangs sends no heartbeat.

    Attributes:
        tasks: the task that runs, or whose end no turn has seen; else none.
        due_s: monotonic time of the next run.
        soonest_s: monotonic time before which nothing makes it run.
        clock_ms: returns what the pool's clock shows.
        grace_ms: how long a client's request waits while there is no worker.
    """

    settings: InitVar[Settings]
    pool: PoolClient
    incarnation: InitVar[str]
    scheduler: Scheduler
    workers: WorkerRegistry
    channels: ChannelSequences
    timeline: TimelineWriter
    clock_ms: Callable[[], int]
    tasks: set[asyncio.Task[list[str]]] = field(default_factory=set)
    due_s: float = 0.0
    soonest_s: float = 0.0

    def __post_init__(self, settings: Settings, incarnation: str) -> None:
        self.grace_ms = math.inf if settings.scale_to_zero else 1000 * settings.worker_grace_s
        self.orphans = OrphanTracker(self.pool)
        self.adapters = AdapterKeeper(self.pool)
        self.heartbeat = Heartbeat(self.pool, "batcher", incarnation, settings.worker_ttl_s)
        self.interval_s = min(settings.heartbeat_s, REPEAT_S)

    @property
    def left_ms(self) -> int:
        """Milliseconds until the next run; 0 or less when it is due."""
        return math.ceil(1000 * (self.due_s - time.monotonic()))

    @property
    def wait_ms(self) -> int:
        """Milliseconds until `start` has something to do."""
        return min(self.left_ms, self.timeline.left_ms) if self.timeline.has_unwritten else self.left_ms

    def start(self, undecodable: int, control_id: str) -> None:
        """Start what is due, unless a task runs. Messages of `control` before `control_id` are handled."""
        if not self.tasks and (self.timeline.is_due or self.left_ms <= 0):
            self.tasks.add(asyncio.create_task(self.run(undecodable, control_id)))

    def hurry(self) -> None:
        """Run soon: a request has come to a pool without workers, and a sleeping one learns of it by the
        state.
        """
        self.due_s = min(self.due_s, self.soonest_s)

    def take_dead(self) -> list[str]:
        """Return the workers that a finished task has found dead. Raises the task's error."""
        done = {task for task in self.tasks if task.done()}
        self.tasks -= done
        return [incarnation for task in done for incarnation in task.result()]

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def run(self, undecodable: int, control_id: str) -> list[str]:
        """Do what is due. Return the workers that are dead."""
        await self.timeline.write()
        if self.left_ms > 0:
            return []
        self.due_s = time.monotonic() + until_beat(self.interval_s)
        self.soonest_s = time.monotonic() + HURRY_S
        orphans = await self.orphans.orphans(self.scheduler.sequences, self.scheduler.gateways)
        dead = await self.workers.check()  # after the orphans: it looks for a jump of the clock
        if self.workers.detector.active:
            for request_id in orphans:
                self.scheduler.cancel(request_id, "gateway")
            absent_ms = 1000 * await self.workers.absent_s()
            if absent_ms > self.grace_ms and not self.scheduler.replicas:  # none has joined meanwhile
                self.end_waiting_clients()
        for request_id in await self.adapters.look(self.scheduler, self.workers.holders):
            self.scheduler.cancel(request_id, "adapter")
        await self.pool.publish(self.channels.repeated_messages(SILENT_S))
        await self.publish_state(undecodable, control_id)
        return dead

    def end_waiting_clients(self) -> None:
        """Cancel the requests of gateways that have waited for WORKER_GRACE_S themselves, as there is no
        worker. Jobs wait for one until their deadline, and so do all with SCALE_TO_ZERO.
        """
        now_ms = self.clock_ms()
        for sequence in list(self.scheduler.sequences.values()):
            if sequence.request.gateway and now_ms - sequence.queued_ms > self.grace_ms:
                self.scheduler.cancel(sequence.request_id, "no_worker")

    async def publish_state(self, undecodable: int, control_id: str) -> None:
        """Trim `control`; write the scheduler's counts and the heartbeat."""
        counts = count(self.scheduler, self.clock_ms()) | {"undecodable": undecodable}
        load = encode(AdapterLoad(count_adapters(self.scheduler.sequences.values())))
        unfit = {"silent": " ".join(sorted(self.workers.silent)), "refused": " ".join(self.workers.refused)}
        await self.pool.run(
            batcher_scripts.publish_state(
                self.pool.keys,
                self.heartbeat.beat(waiting=counts["waiting"], rows=counts["rows"]),
                oldest=control_id,
                state_ttl_ms=STATE_TTL_MS,
                counts=counts | {"adapters": load, **unfit},
            )
        )


def count(scheduler: Scheduler, now_ms: int) -> dict[str, int]:
    """Numbers of workers, live requests, waiting requests, and rows and KV blocks on workers. And what a
    sleeping worker decides by: how long the oldest waiting request has waited, in ms.
    """
    replicas = scheduler.replicas.values()
    waiting = [sequence for sequence in scheduler.sequences.values() if sequence.waiting]
    classes = Counter(sequence.class_index for sequence in waiting)
    return {
        "workers": len(replicas),
        "requests": len(scheduler.sequences),
        "waiting": len(waiting),
        **{f"waiting_{name}": classes[class_index] for class_index, name in enumerate(SERVICE_CLASSES)},
        "rows": sum(len(replica.rows) for replica in replicas),
        "blocks": sum(replica.pool.num_blocks - replica.pool.num_free for replica in replicas),
        "oldest_ms": max((now_ms - sequence.queued_ms for sequence in waiting), default=0),
    }


def count_adapters(sequences: Iterable[Sequence]) -> list[tuple[str, int, int]]:
    """The names of adapters with live requests, and how many of these run and wait."""
    named = [(adapter_name(one.request.adapter), one.row) for one in sequences if one.request.adapter]
    running = Counter(name for name, row in named if row is not None)
    waiting = Counter(name for name, row in named if row is None)
    return [(name, running[name], waiting[name]) for name in sorted({*running, *waiting})]
