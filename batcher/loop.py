"""The active batcher: hears, decides, acts, for ever."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

from redis.asyncio import Redis

from batcher import parse
from batcher.dispatch import Dispatch
from batcher.inbox import Entry, Inbox
from batcher.lease import Lease, LeaseLost
from batcher.orphans import Gateways
from batcher.pending_plan import Order
from batcher.recovery import Recovery
from batcher.replica import Limits
from batcher.scheduler import Scheduler
from batcher.sequence import Sequence
from batcher.terminals import Terminals
from batcher.timeline import Lives
from batcher.workers import Fleet
from common.broker.client import ERRORS, describe_error
from common.broker.keys import POOLS, Keys
from common.broker.sequences import REPEAT_S, ChannelSequences
from common.broker.stream_ids import parse_stream_id
from common.messages.codec import WireError, decode
from common.messages.plan import Report, WorkerDied
from common.messages.request import Cancel
from common.metrics import catalogue
from common.process.heartbeat import Heartbeat
from common.settings.settings import Settings

log = logging.getLogger(__name__)

Action = Callable[[], Awaitable[object]]
TURN_MS = 100
STATE_TTL_MS = 60_000
POOL_FORGOTTEN_S = 3600


class Batcher:
    """One epoch. What is decided but not yet done waits in `actions`: in order, and each can be repeated when
    the broker fails in between.

    Attributes:
        backlog_end: id of the last request queued before this epoch; what is committed of those is read
            before they are placed.
        undecodable: entries that could not be read.
    """

    def __init__(self, settings: Settings, redis: Redis, keys: Keys, lease: Lease, epoch: int) -> None:
        self.settings, self.redis, self.keys, self.lease, self.epoch = settings, redis, keys, lease, epoch
        limits = Limits(settings.max_batch_size, settings.horizon)
        self.channels = ChannelSequences(f"{lease.who}-{epoch}")
        self.scheduler = Scheduler(limits, epoch)
        self.inbox = Inbox(redis)
        self.dispatch = Dispatch(redis, keys)
        self.terminals = Terminals(redis, keys, self.channels)
        self.recovery = Recovery(redis, keys)
        self.workers = Fleet(redis, keys, self.inbox, self.dispatch, self.scheduler, settings.worker_ttl_s)
        self.gateways = Gateways(redis, keys)
        self.sign = Heartbeat(redis, keys, "batcher", lease.who, settings.worker_ttl_s)
        self.lives = Lives(redis, keys, self.workers.now_ms)
        self.actions: deque[Action] = deque()
        self.backlog_end = (0, 0)
        self.undecodable = 0
        self.housekeeping_at = 0.0

    async def run(self) -> None:
        """Raises LeaseLost when another batcher took over."""
        await self.persist(self.begin)
        while True:
            await self.persist(self.turn)

    async def persist(self, verb: Action) -> None:
        """Does `verb`, again and again while the broker fails."""
        while True:
            try:
                await verb()
                return
            except ERRORS as error:
                log.warning("%s", describe_error(error))
                self.workers.distrust()
                await asyncio.sleep(0.2)

    async def begin(self) -> None:
        """Notes what was there before this epoch. Requests are read only when every earlier worker has
        answered, or is dead.
        """
        newest = await self.redis.xrevrange(self.keys.requests, count=1)
        self.backlog_end = parse_stream_id(newest[0][0]) if newest else (0, 0)
        last = await self.redis.xrevrange(self.keys.control, count=1)
        self.inbox.follow(self.keys.control, last[0][0].decode() if last else "0")
        await self.workers.begin()
        log.info("active, epoch %d; %d workers to take over", self.epoch, len(self.workers.unsettled))

    async def turn(self) -> None:
        await self.act()
        await self.lives.write()
        if time.monotonic() >= self.housekeeping_at:
            await self.keep_house()
        if not self.workers.unsettled:
            self.inbox.follow(self.keys.requests)
        for entry in await self.inbox.read(TURN_MS):
            self.hear(entry)
        self.decide()

    async def act(self) -> None:
        """Does what was decided, and what follows from it, until nothing is left."""
        while self.actions:
            await self.actions[0]()
            self.actions.popleft()
            if not self.actions:
                self.decide()

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def hear(self, entry: Entry) -> None:
        """Takes in one entry; one that cannot be read is counted, and not seen again."""
        try:
            if entry.stream == self.keys.requests:
                self.hear_request(entry)
            elif entry.stream == self.keys.control:
                self.hear_control(entry)
            else:
                self.hear_worker(entry)
        except WireError as error:
            self.undecodable += 1
            catalogue.UNDECODABLE.add()
            log.error(
                "entry %s of %s cannot be read (%d so far): %s",
                entry.id,
                entry.stream,
                self.undecodable,
                error,
            )
            if entry.stream == self.keys.requests:
                self.do(partial(self.answer_undecodable, entry))

    def hear_request(self, entry: Entry) -> None:
        if entry.kind != "generate":
            raise WireError(f"unknown kind {entry.kind!r}")
        sequence = parse.sequence(entry)
        if sequence.request_id in self.scheduler.sequences:
            return
        if parse_stream_id(entry.id) <= self.backlog_end:
            self.do(partial(self.restore, sequence))
        else:
            self.lives.queued(sequence)
            self.scheduler.register(sequence)
            self.scheduler.enqueue(sequence)

    def hear_control(self, entry: Entry) -> None:
        match entry.kind:
            case "cancel":
                cancel = decode(Cancel, entry.data)
                self.scheduler.cancel(cancel.request_id, cancel.why)
            case "worker_ready":
                incarnation = parse.name(entry.data)
                self.do(partial(self.workers.greet, incarnation))
            case "died":
                died = decode(WorkerDied, entry.data)
                self.do(partial(self.seal, died.incarnation, "its process ended"))
            case other:
                raise WireError(f"unknown kind {other!r}")

    def hear_worker(self, entry: Entry) -> None:
        incarnation = entry.stream.removeprefix(self.keys.reports(""))
        match entry.kind:
            case "report":
                report = decode(Report, entry.data)
                if report.epoch > self.epoch:
                    raise LeaseLost(f"worker {incarnation} obeys epoch {report.epoch}")
                if (replica := self.scheduler.replicas.get(incarnation)) is not None:
                    self.lives.heard(replica, report)
                self.workers.hear(incarnation, report)
            case "sealed":
                held = self.scheduler.lose(incarnation)
                self.inbox.drop(entry.stream)
                self.do(partial(self.bury, incarnation, held))
            case "open":
                pass
            case other:
                raise WireError(f"unknown kind {other!r}")

    def decide(self) -> None:
        """Turns what was heard into plans and other deeds."""
        for order in self.scheduler.plans():
            self.do(partial(self.send, order))
        outcomes = self.scheduler.take_outcomes()
        for sequence in outcomes.settled:
            self.do(partial(self.settle, sequence))
        for sequence, why in outcomes.unwanted:
            self.do(partial(self.end, sequence, why))
        if outcomes.interrupted:
            self.do(partial(self.resume, outcomes.interrupted))

    async def send(self, order: Order) -> None:
        """Hands a plan over, without the rows that turn out cancelled or ended: those leave the order before
        it is written again.
        """
        incarnation = order.replica.capacity.incarnation
        answer, refused = await self.dispatch.write(order)
        while answer == "refused":
            for row in order.withdraw(refused):
                self.do(partial(self.end, row.sequence, row.sequence.asked_to_end or "client"))
            answer, refused = await self.dispatch.write(order)
        match answer:
            case "OK":
                order.handed_over()
                self.lives.placed(order)
            case "FENCED":
                raise LeaseLost(f"worker {incarnation} has a plan of a newer epoch")
            case "MISSING":
                self.do(partial(self.seal, incarnation, "its logs are gone"))

    async def seal(self, incarnation: str, why: str) -> None:
        """Declares a worker dead. Its sealed reports are read to the end first; without them there is nothing
        to wait for.
        """
        if self.workers.is_buried(incarnation):  # it had sealed its own logs
            return
        log.warning("worker %s is sealed: %s", incarnation, why)
        if await self.workers.seal(incarnation):
            self.inbox.follow(self.keys.reports(incarnation))
        else:
            held = self.scheduler.lose(incarnation)
            self.do(partial(self.bury, incarnation, held))

    async def settle(self, sequence: Sequence) -> None:
        await self.terminals.settle(sequence.request_id, sequence.entry_id, sequence.entry_bytes)
        self.scheduler.forget(sequence)

    async def end(self, sequence: Sequence, why: str) -> None:
        await self.terminals.finish(sequence, why)
        await self.settle(sequence)
        self.lives.ended(sequence, why)

    async def answer_undecodable(self, entry: Entry) -> None:
        if (request_id := parse.request_id(entry.data)) is not None:
            channel: bytes | None = await self.redis.hget(self.keys.request(request_id), "channel")  # type: ignore[misc]
            await self.terminals.say(request_id, (channel or b"").decode(), 60_000, "malformed", 0)
        await self.terminals.settle(request_id or "", entry.id, len(entry.data))

    async def bury(self, incarnation: str, held: list[Sequence]) -> None:
        """A sealed worker: what it held goes on elsewhere, and what it wrote is kept in a place of its own."""
        live = await self.resume(held)
        await self.workers.bury(incarnation)
        self.lives.died(incarnation, live)
        log.warning("worker %s is gone; %d requests go on elsewhere", incarnation, len(live))

    async def resume(self, sequences: list[Sequence]) -> list[Sequence]:
        """Reads what is committed of interrupted requests; the live ones go on from there, and are returned."""
        live, over = await self.recovery.read(sequences)
        for sequence in live:
            self.scheduler.resume(sequence)
        for sequence in over:
            await self.settle(sequence)
        return live

    async def restore(self, sequence: Sequence) -> None:
        """A request from before this epoch. A worker that never answered this epoch cannot be left to go on
        with it.
        """
        if (stranger := await self.recovery.stranger(sequence, self.workers.settled)) is not None:
            await self.workers.seal(stranger)
        self.scheduler.register(sequence)
        for live in await self.resume([sequence]):
            self.lives.taken_over(live)

    async def keep_house(self) -> None:
        """What must be looked at now and then: the lease, signs of life, deadlines."""
        self.housekeeping_at = time.monotonic() + min(self.settings.heartbeat_s, REPEAT_S)
        await self.lease.renew()
        now_s, now_us = await self.redis.time()
        now_ms = now_s * 1000 + now_us // 1000
        self.workers.heed_clock(now_ms)
        self.scheduler.expire(now_ms)
        for incarnation in await self.workers.look():
            self.do(partial(self.seal, incarnation, "no sign of life"))
        if self.workers.trusting:
            for request_id in await self.gateways.orphans(self.scheduler.sequences.values()):
                self.scheduler.cancel(request_id, "gateway")
        for channel, payload in self.channels.repeated_messages():
            await self.redis.publish(channel, payload)
        await self.show_state()

    async def show_state(self) -> None:
        figures = self.scheduler.figures()
        async with self.redis.pipeline() as pipe:
            pipe.hset(self.keys.state, mapping={**figures, "undecodable": self.undecodable})
            pipe.pexpire(self.keys.state, STATE_TTL_MS)
            pipe.zadd(POOLS, {self.keys.pool: time.time()})
            pipe.zremrangebyscore(POOLS, 0, time.time() - POOL_FORGOTTEN_S)
            await pipe.execute()
        await self.sign.send(waiting=figures["waiting"], rows=figures["rows"])
