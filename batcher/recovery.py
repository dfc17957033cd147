"""Recovery: interrupted requests go on from their committed tokens, requests that no worker holds end, and
the queue entries of all that have ended are removed.

Committed tokens are read from the request's own string and from the log of the worker that held it. Tokens
that only the log has are first saved to the string, so that the log can be deleted.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from redis.exceptions import ResponseError

from batcher import batcher_scripts, inbox
from batcher.actions import Action, ActionQueue, ScriptAction
from batcher.inbox import StreamEntry
from batcher.lease import LeaseLost
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from batcher.timeline import TimelineWriter
from batcher.worker_registry import KnownWorker, WorkerRegistry, WorkerState
from common.broker import committed
from common.broker.committed import Committed, T, log_tokens, read_slice
from common.broker.keys import SEALED
from common.broker.lua import ScriptCall
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode, encode
from common.messages.events import ChannelSequences, Events, Tokens, terminal_for
from common.messages.plan import Report, WorkerDied
from common.process.logs import first_incarnation, for_request, plural

log = logging.getLogger(__name__)
UNDECODABLE_RESULT_TTL_MS = 60_000


ENTRIES_IN_ONE_READ = 256
APPENDED_IN_ONE_SLICE = 2048
SAVED_IN_ONE_CALL = 64
RESTORED_AT_ONCE = 512
REQUESTS_IN_ONE_READ = 256
SEALED_ENTRIES_IN_ONE_READ = 16
MAX_DEQUEUED = 32
"""Requests that one script removes from the queue: it holds the broker for some 0.2 ms."""


@dataclass(eq=False)
class Recovery:
    """Resumes requests, and ends those that no worker holds. Each coroutine may be repeated: sequences change
    only after everything was saved, and a request gets one terminal only.

    Coroutines that read many requests are deferred: they run once all earlier decisions are written. At the
    start of the epoch, when every plan of earlier epochs is refused, what is from before is read, in slices.

    Attributes:
        control_id: the last entry of `control` from before this epoch that was read.
        dead: workers that a launcher has reported dead by then.
        last_id: the last entry of `requests` that was read; later ones are new requests.
        unread: sequences whose state was not read yet.
        held_by: sequences by the worker that the last plan gave them to, or "" if no worker holds them.
        ended: sequences that have their terminal, and their state.
    """

    pool: PoolClient
    pending: ActionQueue
    scheduler: Scheduler
    workers: WorkerRegistry
    channels: ChannelSequences
    timeline: TimelineWriter
    control_id: str = "0"
    dead: set[str] = field(default_factory=set)
    last_id: str = "0"
    unread: list[Sequence] = field(default_factory=list)
    held_by: dict[str, list[Sequence]] = field(default_factory=dict)
    ended: list[tuple[Sequence, Committed]] = field(default_factory=list)

    # --- requests from before this epoch --------------------------------------------------------------------

    async def read_control(self) -> None:
        """Read the deaths. Cancels are also in the hashes of requests, and workers have heartbeats."""
        while entries := await self.pool.redis.xrange(
            self.pool.keys.control, f"({self.control_id}", count=ENTRIES_IN_ONE_READ
        ):
            self.control_id = entries[-1][0].decode()
            for _, fields in entries:
                if (data := fields.get(b"died")) is not None:
                    with contextlib.suppress(WireError):
                        self.dead.add(decode(WorkerDied, data).incarnation)

    async def read_requests(self, on_entry: Callable[[StreamEntry], None]) -> None:
        """Call `on_entry` with every entry of `requests`, and read the state of the `unread` sequences."""
        while True:
            await self.read_states()
            stream = self.pool.keys.requests
            entries = await self.pool.redis.xrange(stream, f"({self.last_id}", count=ENTRIES_IN_ONE_READ)
            if not entries:
                return
            self.last_id = entries[-1][0].decode()
            for entry_id, fields in entries:
                on_entry(StreamEntry(stream, entry_id.decode(), fields))

    async def read_states(self) -> None:
        """Read the state of the sequences in `unread`: which worker held them, and whether they go on."""
        states = await read_saved(self.pool, ids_of(self.unread), with_tokens=False)
        for sequence in self.unread:
            state = states[sequence.request_id]
            if state.is_live:
                update(sequence, state)
                self.held_by.setdefault(state.worker, []).append(sequence)
            else:
                self.ended.append((sequence, state))
        self.unread = []

    def on_takeover_report(self, incarnation: str, report: Report) -> None:
        """Adopt the rows that a worker holds, and resume the requests that it held before and holds no more.

        Raises ValueError if the report contradicts itself; then the worker must be sealed.
        """
        held = self.held_by.get(incarnation, [])
        left = self.workers.activate(incarnation, report, held)
        self.held_by.pop(incarnation, None)
        for part in in_slices(left, RESTORED_AT_ONCE):
            self.pending.defer(partial(self.restore, part))

    def settle(self) -> None:
        """End what has ended, resume what no worker held, and seal the dead: all from before this epoch."""
        for sequence, state in self.ended:
            self.timeline.note_unseen_end(sequence, state)
        self.dequeue([sequence for sequence, _ in self.ended])
        for part in in_slices(self.held_by.pop("", []), RESTORED_AT_ONCE):
            self.pending.defer(partial(self.enqueue_unheld, part))
        for incarnation in self.workers.dead_holders(self.held_by, self.dead):
            self.pending.add(partial(self.seal, incarnation, "it ended before this epoch"))

    async def seal_process(self, incarnation: str) -> None:
        """Declare every incarnation of a process dead, by the name that its launcher gave it."""
        for name in sorted(self.workers.workers):
            if first_incarnation(name) == incarnation:
                await self.seal(name, "its process ended")

    async def seal(self, incarnation: str, why: str) -> None:
        """Declare a worker dead. It is removed when its reports are read to the seal, or at once."""
        if self.workers.state(incarnation) in (WorkerState.SEALED, WorkerState.REMOVED):
            return  # it had sealed its own logs
        log.warning("worker %s is sealed: %s", incarnation, why)
        if await self.workers.seal(incarnation):
            self.workers.inbox.follow(self.pool.keys.reports(incarnation))
        else:
            self.remove(incarnation)

    def remove(self, incarnation: str) -> None:
        """Remove a sealed worker whose reports were read."""
        self.workers.workers[incarnation] = KnownWorker(WorkerState.SEALED)
        held = self.scheduler.remove_worker(incarnation) + self.held_by.pop(incarnation, [])
        self.pending.defer(partial(self.remove_worker, incarnation, held))

    async def resume(self, sequences: list[Sequence]) -> list[Sequence]:
        """Resume requests that their workers hold no more. Return those that are live."""
        states = await committed.read(self.pool, ids_of(sequences))
        await self.save(states)
        return self.enqueue(sequences, states)

    def dequeue(self, sequences: list[Sequence]) -> None:
        """Remove requests that have their terminals from the scheduler, and then from the queue: their ids
        may come again at any time. One that has none is resumed: the worker that reported its end was not
        allowed to end it.
        """
        for sequence in sequences:
            self.scheduler.forget(sequence)

        def call(part: list[Sequence]) -> ScriptCall[list[int]]:
            entries = [(one.request_id, one.entry_id) for one in part]
            return batcher_scripts.dequeue(self.pool.keys, entries)

        def on_reply(part: list[Sequence], flags: list[int]) -> list[Action]:
            left = []
            for sequence, has_ended in zip(part, flags, strict=True):
                if has_ended:
                    self.timeline.record_dequeued(sequence)
                elif sequence.request_id not in self.scheduler.sequences:
                    self.scheduler.register(sequence)
                    left.append(sequence)
            return [partial(self.resume, left)] if left else []

        for part in in_slices(sequences, MAX_DEQUEUED):
            self.pending.add(ScriptAction(partial(call, part), partial(on_reply, part)))

    async def restore(self, sequences: list[Sequence]) -> None:
        """Resume requests that their workers, from before this epoch, hold no more. Most have ended."""
        states = await read_saved(self.pool, ids_of(sequences), with_tokens=False)
        for sequence in await self.resume(self.drop_ended(sequences, states)):
            self.timeline.record_takeover(sequence)

    async def enqueue_unheld(self, sequences: list[Sequence]) -> None:
        """Enqueue requests that no worker held: their strings have all of their tokens."""
        placed = [sequence for sequence in sequences if sequence.attempt]
        new = [sequence for sequence in sequences if not sequence.attempt]
        states = await read_saved(self.pool, ids_of(placed))
        for sequence in new:
            self.scheduler.enqueue(sequence)
        for sequence in [*new, *self.enqueue(placed, states)]:
            self.timeline.record_takeover(sequence)

    async def remove_worker(self, incarnation: str, held: list[Sequence]) -> None:
        """Save the tokens in a sealed worker's log, resume the requests that it held, and delete its keys."""
        logged, why = await read_sealed_log(self.pool, incarnation)
        names = {tokens.request_id for tokens in logged} | {*ids_of(held)}
        states = await read_saved(self.pool, names)
        for part in in_slices(logged, APPENDED_IN_ONE_SLICE):
            committed.append_tokens(part, states)
            await asyncio.sleep(0)
        await self.save(states, incarnation, is_crash=why == "died")
        live = self.enqueue(held, states)
        await self.workers.remove_worker_keys(incarnation)
        self.timeline.record_death(incarnation, live, why)
        level = logging.INFO if why == "drained" else logging.WARNING
        log.log(level, "worker %s is removed; %s resumed", incarnation, plural(len(live), "request"))

    async def save(self, states: dict[str, Committed], worker: str = "", is_crash: bool = False) -> None:
        """Append to each request's string the tokens that only logs have, and record that `worker` (without
        it, any worker) holds the request no more. Raises LeaseLost.
        """
        for state in states.values():
            crash_count = state.crash_count + (is_crash and state.worker == worker)
            state.crash_count = 0 if state.num_tokens > state.base else crash_count  # of workers in a row
        keys, epoch = self.pool.keys, self.scheduler.epoch
        for part in in_slices([item for item in states.items() if item[1].is_live], SAVED_IN_ONE_CALL):
            call = batcher_scripts.save_committed(keys, own_epoch=epoch, states=dict(part), worker=worker)
            await self.run_in_epoch(call)

    async def run_in_epoch(self, call: ScriptCall[str]) -> None:
        """Run a script that the broker refuses once a newer epoch has begun. Raises LeaseLost then."""
        if await self.pool.run(call) == "FENCED":
            raise LeaseLost(f"epoch {self.scheduler.epoch} is over")

    def enqueue(self, sequences: list[Sequence], states: dict[str, Committed]) -> list[Sequence]:
        """Update sequences to what is committed, and enqueue those that are live. Return the live ones."""
        live = self.drop_ended(sequences, states)
        for sequence in live:
            if not sequence.waiting and sequence.row is None:
                sequence.commit(states[sequence.request_id].records)
                update(sequence, states[sequence.request_id])
                self.scheduler.resume(sequence)
        return live

    def drop_ended(self, sequences: list[Sequence], states: dict[str, Committed]) -> list[Sequence]:
        """Remove those that have ended. Return the others."""
        ended = [one for one in sequences if not states[one.request_id].is_live]
        for sequence in ended:
            self.timeline.note_unseen_end(sequence, states[sequence.request_id])
        self.dequeue(ended)
        return [one for one in sequences if states[one.request_id].is_live]

    # --- ends of requests that no worker holds --------------------------------------------------------------

    async def finish(self, sequence: Sequence, why: str) -> None:
        """End a request that no worker holds. A terminal that it has already stays. Raises LeaseLost."""
        request = sequence.request
        await self.publish(request.request_id, request.channel, request.kept_ms, why, sequence.base)
        log.info(
            "request %s ended by the batcher: %s",
            request.request_id,
            why,
            extra=for_request(request.request_id, request.traceparent),
        )
        self.timeline.record(sequence, "ended", num_tokens=sequence.base, why=why)
        self.dequeue([sequence])

    async def replace_entry(self, sequence: Sequence, entry: StreamEntry) -> None:
        """Remove the entry of a live request that a gateway has queued again, after the broker lost it."""
        if sequence.entry_id != entry.id:
            await self.delete_entry("", sequence.entry_id)
        sequence.entry_id = entry.id

    async def finish_undecodable(self, entry: StreamEntry) -> None:
        """Remove an entry that is no valid request; publish a terminal if its request id can be read."""
        if (request_id := inbox.parse_request_id(entry.data)) is not None:
            channel: bytes | None = None
            with contextlib.suppress(ResponseError):  # the key is somebody else's, of another type
                channel = await self.pool.redis.hget(self.pool.keys.request(request_id), "channel")  # type: ignore[misc]
            await self.publish(
                request_id, (channel or b"").decode(), UNDECODABLE_RESULT_TTL_MS, "malformed", 0
            )
        await self.delete_entry(request_id or "", entry.id)

    async def publish(self, request_id: str, channel: str, kept_ms: int, why: str, num_tokens: int) -> None:
        terminal = terminal_for(request_id, why, num_tokens)
        number = self.channels.next_number(channel) if channel else 0
        events = Events(self.channels.source, number, terminals=[terminal])
        call = batcher_scripts.finish(
            self.pool.keys,
            terminal,
            own_epoch=self.scheduler.epoch,
            kept_ms=kept_ms,
            channel=channel,
            payload=encode(events),
        )
        await self.run_in_epoch(call)

    async def delete_entry(self, request_id: str, entry_id: str) -> None:
        """Remove an entry from the queue, unless its request has not ended."""
        await self.pool.run(batcher_scripts.dequeue(self.pool.keys, [(request_id, entry_id)]))


def ids_of(sequences: Iterable[Sequence]) -> list[str]:
    return [sequence.request_id for sequence in sequences]


def update(sequence: Sequence, state: Committed) -> None:
    sequence.attempt = state.attempt
    sequence.crash_count = state.crash_count
    if state.cancelled and not sequence.stop_reason:
        sequence.stop_reason = "client"


async def read_saved(
    pool: PoolClient, request_ids: Iterable[str], with_tokens: bool = True
) -> dict[str, Committed]:
    """Return the state of each request without what only a log has.

    It is read in slices, so that neither broker nor caller is busy for long. `with_tokens`: the strings of
    live requests, too.
    """
    states: dict[str, Committed] = {}
    for names in in_slices(list(request_ids), REQUESTS_IN_ONE_READ):
        offsets = dict.fromkeys(names, 0 if with_tokens else None)
        states |= await read_slice(pool, offsets, of_ended=False)
    return states


async def read_sealed_log(pool: PoolClient, worker: str) -> tuple[list[Tokens], str]:
    """Return all tokens in a sealed worker's log, and why it was sealed; it is read in slices."""
    logged: list[Tokens] = []
    begin, why = "-", ""
    while entries := await pool.redis.xrange(pool.keys.log(worker), begin, count=SEALED_ENTRIES_IN_ONE_READ):
        logged += log_tokens(entries)
        last_id, fields = entries[-1]
        if last_id == SEALED.encode():
            why = fields.get(b"why", b"died").decode()
            break
        begin = f"({last_id.decode()}"
    return logged, why


def in_slices(items: list[T], size: int) -> Iterator[list[T]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))
