"""Workers of the pool: what this epoch knows of each, and how it is given plans; which of them are dead,
which are silent, and for how long the pool has had none.

A worker without a heartbeat is dead. But heartbeats are also missing after the broker was away or slow, after
its clock jumped, and after this process was stopped. Then no worker is declared dead until each has had time
for a new heartbeat.

A worker that has a heartbeat is silent if it does not say what it owes: an answer to a takeover and, while it
has rows, reports, at least one a second however long a step takes, which show the plans that it has seen. Its
agent says all that, not its engine: for an engine that hangs, or computes or compiles for long, there is the
agent's own watchdog.
"""

import contextlib
import logging
import time
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

from batcher import batcher_scripts
from batcher.inbox import Inbox
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from common.adapters import HeldAdapters
from common.broker import heartbeat
from common.broker.keys import SLEEPER, STARTING
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode
from common.messages.plan import Plan, Report, WorkerCapacity
from common.process.logs import first_incarnation, plural

log = logging.getLogger(__name__)

CLOCK_JUMP_MS = 1000
STALL_S = 2.0
"""Time between two checks after which heartbeats may be missing: checks come every HEARTBEAT_S."""


class FailureDetector:
    """Active unless it was paused less than `ttl_s` ago. It is paused until then from its first check on.

    Attributes:
        resumes_s: monotonic time at which the pause ends.
        clock_offset_ms: the broker's clock minus the monotonic clock, as last seen.
        checked_s: monotonic time of the last `check_stall`.
    """

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.clock_offset_ms: float | None = None
        self.checked_s = time.monotonic()
        self.resumes_s = 0.0
        self.pause()

    def pause(self) -> None:
        self.resumes_s = time.monotonic() + self.ttl_s

    @property
    def active(self) -> bool:
        return time.monotonic() >= self.resumes_s

    def is_dead(self, has_heartbeat: bool, seen_ms: float, now_ms: float) -> bool:
        """Whether a worker is dead whose last heartbeat came at `seen_ms`. A time in the future does not
        count: the broker's clock has gone back since, so the heartbeat would last too long. A step back that
        makes no pause is too small for that.
        """
        return self.active and not (has_heartbeat and seen_ms <= now_ms + CLOCK_JUMP_MS)

    def check_stall(self) -> None:
        """Pause if the last check is long ago: the broker was busy, or this process was stopped."""
        now_s = time.monotonic()
        if now_s - self.checked_s > STALL_S:
            log.warning("no reply from the broker for %.1f s", now_s - self.checked_s)
            self.pause()
        self.checked_s = now_s

    def check_clock_jump(self, now_ms: float) -> None:
        """Pause if the broker's clock, which expires heartbeats, has jumped, or may have jumped before the
        first check.
        """
        offset_ms = now_ms - time.monotonic() * 1000
        if self.clock_offset_ms is None:
            self.pause()
        elif abs(offset_ms - self.clock_offset_ms) > CLOCK_JUMP_MS:
            log.warning("the broker's clock jumped by %.1f s", (offset_ms - self.clock_offset_ms) / 1000)
            self.pause()
        self.clock_offset_ms = offset_ms

    def now_ms(self) -> int:
        """The broker's clock, extrapolated from the last check."""
        return round(time.monotonic() * 1000 + (self.clock_offset_ms or 0.0))


Thing = TypeVar("Thing", bound=Hashable)


class Since(Generic[Thing]):
    """For how long things have been so without a break.

    Attributes:
        since_s: each thing that was so at the last look → monotonic time of the first look at which it was.
    """

    def __init__(self) -> None:
        self.since_s: dict[Thing, float] = {}

    def look(self, things: Iterable[Thing]) -> None:
        """Note what is so now. What is not so any more begins anew."""
        now_s = time.monotonic()
        self.since_s = {thing: self.since_s.get(thing, now_s) for thing in things}

    def lasts_s(self, thing: Thing) -> float:
        """Return for how long a thing has been so; 0 if it is not."""
        return time.monotonic() - self.since_s[thing] if thing in self.since_s else 0.0

    def lasting(self, seconds: float) -> list[Thing]:
        """Return the things that have been so for so long."""
        return [thing for thing in self.since_s if self.lasts_s(thing) >= seconds]


SILENT_S = 10.0
"""A worker that has been silent for so long is called that."""
LOST_S = 60.0
"""One that has been silent for so long is sealed. Its agent gives a connection that hangs up before that, and
may write the logits of many tokens before the next report.
"""


class WorkerState(Enum):
    """State of one incarnation. Every worker is taken over first: it reports the rows that it holds."""

    FOUND = auto()
    """It is in Redis; no takeover was sent yet."""
    UNREADABLE = auto()
    """Its capacity cannot be decoded (another version), so it cannot be given plans."""
    REFUSED = auto()
    """It has another model than the workers of this epoch, and waits until those are gone."""
    TAKEOVER_SENT = auto()
    ACTIVE = auto()
    """It answered the takeover."""
    SEALED = auto()
    """It was sealed, and its reports were read to the end."""
    REMOVED = auto()
    """It was sealed, its reports were read to the end, and its keys are deleted."""


UNFIT = (WorkerState.UNREADABLE, WorkerState.REFUSED)
UNSENT = (WorkerState.FOUND, *UNFIT)


@dataclass(slots=True)
class KnownWorker:
    """One incarnation.

    Attributes:
        is_earlier: it was there before this epoch, so it may hold requests.
        draining: it was told to end before its takeover.
        held: its adapters, as its heartbeat says; None if it serves none.
    """

    state: WorkerState = WorkerState.FOUND
    is_earlier: bool = False
    draining: bool = False
    capacity: WorkerCapacity | None = None
    held: HeldAdapters | None = None

    def note_adapters(self, held: bytes | None) -> None:
        """Note what a heartbeat says of adapters; what cannot be read changes nothing."""
        if held:
            with contextlib.suppress(WireError):
                self.held = decode(HeldAdapters, held)

    @property
    def loaded(self) -> frozenset[str]:
        """The keys of the adapters with which rows may start."""
        return frozenset(self.held.loaded if self.held else ())

    @property
    def is_followed(self) -> bool:
        """Whether its reports are read."""
        return self.state in (WorkerState.TAKEOVER_SENT, WorkerState.ACTIVE)

    @property
    def is_pending(self) -> bool:
        """Whether it may still hold requests from before this epoch."""
        return self.is_earlier and self.state in (*UNSENT, WorkerState.TAKEOVER_SENT)


@dataclass(eq=False)
class WorkerRegistry:
    """Takes workers over, and finds those that are dead.

    Attributes:
        listed: incarnations in the pool at the last look.
        sealed: incarnations that were sealed before this epoch and not removed.
        silence: (worker, what it owes, what was last heard of that), while nothing else is heard.
        silent: incarnations with a heartbeat that do not say what they owe.
        lost: those of them that have been silent for too long.
        absence: since when the pool has had no worker.
    """

    pool: PoolClient
    inbox: Inbox
    scheduler: Scheduler
    detector: FailureDetector
    workers: dict[str, KnownWorker] = field(default_factory=dict)
    listed: list[str] = field(default_factory=list)
    sealed: list[str] = field(default_factory=list)
    silence: Since[tuple[str, str, int]] = field(default_factory=Since)
    silent: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    absence: Since[str] = field(default_factory=Since)

    def state(self, incarnation: str) -> WorkerState:
        return self.workers[incarnation].state if incarnation in self.workers else WorkerState.FOUND

    @property
    def holders(self) -> list[HeldAdapters]:
        """What the workers have that serve adapters, those included that are still to be taken over."""
        others = (WorkerState.REFUSED, WorkerState.SEALED, WorkerState.REMOVED)
        return [one.held for one in self.workers.values() if one.held and one.state not in others]

    def pending_takeovers(self) -> Iterator[str]:
        """Workers from before this epoch that may still hold requests."""
        return (incarnation for incarnation, worker in self.workers.items() if worker.is_pending)

    def dead_holders(self, holders: Iterable[str], dead: set[str]) -> list[str]:
        """Return the workers from before this epoch that are known to be dead: their launcher said so, they
        are sealed, or they hold requests and are not in the pool.
        """
        missing = {holder for holder in holders if holder not in self.workers}
        declared = {name for name in self.pending_takeovers() if first_incarnation(name) in dead}
        return sorted(missing | declared | {*self.sealed})

    async def start_epoch(self) -> None:
        """Send the takeover to every worker of the pool, first to those that have had plans: theirs is the
        pool's model.
        """
        for incarnation in await self.pool.workers():
            self.workers.setdefault(incarnation, KnownWorker(is_earlier=True))
        self.sealed = await self.pool.sealed()  # after `workers`: a seal moves a worker to `sealed`
        pending = list(self.pending_takeovers())
        had_plans = {one: await self.has_plans(one) for one in pending}
        for incarnation in sorted(pending, key=had_plans.__getitem__, reverse=True):
            await self.send_takeover(incarnation)

    async def has_plans(self, incarnation: str) -> bool:
        """Whether a worker was ever given a plan; one that was not holds no request."""
        return bool(await self.pool.redis.exists(self.pool.keys.plans(incarnation)))

    async def send_takeover(self, incarnation: str) -> None:
        """Send a worker with a heartbeat the first plan of the epoch, once; it answers with the rows that it
        holds. Drain a worker that was told to end.
        """
        state, capacity, held = await self.pool.redis.hmget(  # type: ignore[misc]
            self.pool.keys.worker(incarnation), ["state", "capacity", "adapters"]
        )
        if state == b"draining":
            self.scheduler.workers.drain(incarnation)
        if state is None or self.state(incarnation) not in UNSENT:
            return
        worker = self.workers.setdefault(incarnation, KnownWorker())
        worker.draining = state == b"draining"
        worker.note_adapters(held)
        try:
            worker.capacity = decode(WorkerCapacity, capacity)
        except WireError as error:
            if worker.state is not WorkerState.UNREADABLE:
                log.error("worker %s: its capacity cannot be read: %s", incarnation, error)
            worker.state = WorkerState.UNREADABLE
            return
        if other := self.of_another_model(worker.capacity):
            worker.is_earlier &= await self.has_plans(incarnation)
            if worker.state is not WorkerState.REFUSED:
                cause = f"the files of its model ({worker.capacity.model_id}) are not those of {other}"
                log.error("worker %s waits until no other is left: %s", incarnation, cause)
            worker.state = WorkerState.REFUSED
            return
        worker.state = WorkerState.FOUND
        plan, keys = Plan(self.scheduler.epoch, 1, 0, 0, takeover=True), self.pool.keys
        call = batcher_scripts.publish_plan(keys, incarnation, plan=plan, oldest=1)
        is_sent = (await self.pool.run(call))[0] == "OK"
        if is_sent and self.state(incarnation) in UNSENT:  # it may have answered another call, or ended
            worker.state = WorkerState.TAKEOVER_SENT
            self.inbox.follow(self.pool.keys.reports(incarnation))

    def of_another_model(self, capacity: WorkerCapacity) -> str:
        """A worker taken over in this epoch that has another model; empty if none has. One without a digest,
        of an earlier release, has any model.
        """
        for incarnation, worker in self.workers.items():
            other = worker.capacity if worker.state is not WorkerState.REFUSED else None
            if other and len({capacity.model_digest, other.model_digest} - {""}) > 1:
                return incarnation
        return ""

    @property
    def refused(self) -> list[str]:
        """Workers of another model that wait."""
        return sorted(one for one, worker in self.workers.items() if worker.state is WorkerState.REFUSED)

    def answers_takeover(self, incarnation: str, report: Report) -> bool:
        """Whether a report answers this epoch's takeover, for the first time."""
        worker = self.workers.get(incarnation)
        return (
            worker is not None
            and worker.state is WorkerState.TAKEOVER_SENT
            and report.takeover
            and report.epoch == self.scheduler.epoch
        )

    def activate(self, incarnation: str, report: Report, sequences: list[Sequence]) -> list[Sequence]:
        """Make a worker active, with its rows. Return the `sequences` that it does not hold.

        Raises ValueError if the report contradicts itself.
        """
        worker = self.workers[incarnation]
        assert worker.capacity is not None
        left = self.scheduler.add_worker(worker.capacity, report, sequences)
        worker.state = WorkerState.ACTIVE
        self.scheduler.set_adapters(incarnation, worker.loaded)
        if worker.draining:
            self.scheduler.workers.drain(incarnation)
        held = len(sequences) - len(left)
        log.info(
            "worker %s joined: %d blocks of %d tokens%s",
            incarnation,
            worker.capacity.num_blocks,
            worker.capacity.block_size,
            f"; {plural(held, 'row')} adopted" if held else "",
        )
        return left

    async def check(self) -> list[str]:
        """Take over new workers. Return the workers that must be sealed: dead and lost ones, and unreadable
        and refused ones that may hold requests from before this epoch. Forget those that are removed and not
        listed.
        """
        self.workers = {
            name: worker
            for name, worker in self.workers.items()
            if worker.state is not WorkerState.REMOVED or name in self.listed
        }
        known = {name for name, worker in self.workers.items() if worker.is_followed or worker.is_pending}
        fields = ["state", "adapters"]
        found, seen_ms, now_ms = await self.pool.look_at_workers({*self.listed, *known}, fields)
        self.listed = [*seen_ms]
        states = {name: state for name, (state, _) in found.items() if name in known or name in seen_ms}
        self.detector.check_stall()
        self.detector.check_clock_jump(now_ms)
        for incarnation, state in states.items():
            if state == b"draining":  # before any takeover: no row goes from one of them to another
                self.scheduler.workers.drain(incarnation)
        for incarnation in states.keys() & self.workers.keys():
            self.workers[incarnation].note_adapters(found[incarnation][1])
            self.scheduler.set_adapters(incarnation, self.workers[incarnation].loaded)
        for incarnation, state in states.items():
            if state is not None and self.state(incarnation) in UNSENT:
                await self.send_takeover(incarnation)
        dead = {
            incarnation
            for incarnation, state in states.items()
            if self.detector.is_dead(state is not None, seen_ms.get(incarnation, 0), now_ms)
        }
        unfit = {one for one in self.pending_takeovers() if self.state(one) in UNFIT}
        self.note_silence({incarnation for incarnation, state in states.items() if state is not None})
        return sorted(dead | unfit | self.lost)

    def note_silence(self, alive: Iterable[str]) -> None:
        """Note which of these workers are silent. What is read and not handled yet may be of them; and after
        a pause of the detector all begin anew.
        """
        unheard = {entry.stream for entry in self.inbox.unhandled}
        listened = [one for one in alive if self.pool.keys.reports(one) not in unheard]
        debts = [(one, what, heard) for one in listened for what, heard in self.debts(one).items()]
        self.silence.look(debts if self.detector.active else [])
        self.silent, self.lost = (
            {worker for worker, *_ in self.silence.lasting(seconds)} for seconds in (SILENT_S, LOST_S)
        )

    async def absent_s(self) -> float:
        """For how long the pool has had no worker, not even one that is starting, or serves another pool in
        its turn.
        """
        kinds = () if self.scheduler.replicas else (STARTING, SLEEPER)
        coming = [
            self.pool.keys.process(kind, name) for kind in kinds for name in await self.pool.processes(kind)
        ]
        is_there = self.scheduler.replicas or (coming and await self.pool.redis.exists(*coming))
        self.absence.look([] if is_there else ["no worker"])
        return self.absence.lasts_s("no worker")

    def debts(self, incarnation: str) -> dict[str, int]:
        """What a worker owes, with what was last heard of it."""
        if self.state(incarnation) is WorkerState.TAKEOVER_SENT:
            return {"takeover": 0}
        replica = self.scheduler.replicas.get(incarnation)
        return replica.debts if replica is not None else {}

    async def seal(self, incarnation: str) -> bool:
        """Seal a worker's logs: nothing can be appended any more. Return whether they exist.

        The seal says why: only where a worker died can one of its rows be the cause.
        """
        replica = self.scheduler.replicas.get(incarnation)
        if self.state(incarnation) is WorkerState.UNREADABLE:
            why = "unreadable"
        else:
            is_told = self.state(incarnation) is WorkerState.REFUSED or (replica and replica.draining)
            why = "drained" if is_told else "died"
        return await self.pool.run(heartbeat.seal(self.pool.keys, incarnation, why=why))

    async def remove_worker_keys(self, incarnation: str) -> None:
        """Delete the keys of a sealed worker whose reports were read to the end."""
        keys = self.pool.keys
        async with self.pool.redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.log(incarnation), keys.reports(incarnation), keys.plans(incarnation))
            pipe.srem(keys.sealed, incarnation)
            await pipe.execute()
        self.inbox.unfollow(keys.reports(incarnation))
        self.workers[incarnation] = KnownWorker(WorkerState.REMOVED)
