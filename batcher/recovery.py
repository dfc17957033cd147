"""Recovery: interrupted requests go on from their committed tokens, requests that no worker holds end, and
the queue entries of all that have ended are removed.

Committed tokens are read from the request's own string and from the log of the worker that held it. Tokens
that only the log has are first saved to the string, so that the log can be deleted.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from batcher import batcher_scripts, inbox
from batcher.actions import Action, ActionQueue, ScriptAction
from batcher.batcher_scripts import QueuedRequest, SavedRequest
from batcher.inbox import StreamEntry
from batcher.lease import LeaseLost
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from batcher.timeline import TimelineWriter
from batcher.worker_registry import WorkerRegistry, WorkerState
from common.broker import committed
from common.broker.committed import Committed, T, log_tokens, read_slice
from common.broker.keys import SEALED
from common.broker.lua import ScriptCall
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode, encode
from common.messages.events import ChannelSequences, Events, Tokens, terminal_for
from common.messages.plan import Report, WorkerDied
from common.process.logs import for_request, plural

log = logging.getLogger(__name__)
UNDECODABLE_RESULT_TTL_MS = 60_000


ENTRIES_IN_ONE_READ = 256
APPENDED_IN_ONE_SLICE = 2048
SAVED_IN_ONE_CALL = 64
RESTORED_AT_ONCE = 512
REQUESTS_IN_ONE_READ = 256
SEALED_ENTRIES_IN_ONE_READ = 16


class Backlog:
    """Requests and deaths from before this epoch. It is read once, in slices, at the start of the epoch, when
    every plan of earlier epochs is refused.

    Attributes:
        control_id: the last entry of `control` that was read.
        dead: workers that a launcher has reported dead.
        last_id: the last entry of `requests` that was read; later ones are new requests.
        unread: sequences whose state was not read yet.
        held_by: sequences by the worker that the last plan gave them to, or "" if no worker holds them.
        ended: sequences that have their terminal, and their state.
    """

    def __init__(self, pool: PoolClient) -> None:
        self.pool = pool
        self.control_id = "0"
        self.dead: set[str] = set()
        self.last_id = ""
        self.unread: list[Sequence] = []
        self.held_by: dict[str, list[Sequence]] = {}
        self.ended: list[tuple[Sequence, Committed]] = []

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
            if not (entries := await self.read_entries()):
                return
            for entry in entries:
                on_entry(entry)

    async def read_entries(self) -> list[StreamEntry]:
        """Return the next entries of `requests`; none at its end."""
        begin, stream = f"({self.last_id}" if self.last_id else "-", self.pool.keys.requests
        entries = await self.pool.redis.xrange(stream, begin, count=ENTRIES_IN_ONE_READ)
        if entries:
            self.last_id = entries[-1][0].decode()
        return [StreamEntry(stream, entry_id.decode(), fields) for entry_id, fields in entries]

    async def read_states(self) -> None:
        """Read the state of the sequences in `unread`: which worker held them, and whether they go on."""
        names = [sequence.request_id for sequence in self.unread]
        states = await read_saved(self.pool, names, with_tokens=False)
        for sequence in self.unread:
            self.sort(sequence, states[sequence.request_id])
        self.unread = []

    def sort(self, sequence: Sequence, state: Committed) -> None:
        if not state.is_live:
            self.ended.append((sequence, state))
            return
        update(sequence, state)
        self.held_by.setdefault(state.worker, []).append(sequence)


@dataclass(eq=False)
class Recovery:
    """Resumes requests, and ends those that no worker holds. Each coroutine may be repeated: sequences change
    only after everything was saved, and a request gets one terminal only.

    Coroutines that read many requests are deferred: they run once all earlier decisions are written.
    """

    pool: PoolClient
    pending: ActionQueue
    scheduler: Scheduler
    workers: WorkerRegistry
    channels: ChannelSequences
    timeline: TimelineWriter
    backlog: Backlog

    def on_takeover_report(self, incarnation: str, report: Report) -> None:
        """Adopt the rows that a worker holds, and resume the requests that it held before and holds no more.

        Raises ValueError if the report contradicts itself; then the worker must be sealed.
        """
        held = self.backlog.held_by.get(incarnation, [])
        left = self.workers.activate(incarnation, report, held)
        self.backlog.held_by.pop(incarnation, None)
        for part in in_slices(left, RESTORED_AT_ONCE):
            self.pending.defer(partial(self.restore, part))

    def restore_unheld(self) -> None:
        """Resume the requests from before this epoch that no worker held."""
        for part in in_slices(self.backlog.held_by.pop("", []), RESTORED_AT_ONCE):
            self.pending.defer(partial(self.enqueue_unheld, part))

    async def seal_process(self, incarnation: str) -> None:
        """Declare every incarnation of a process dead, by the name that its launcher gave it."""
        for name in sorted(self.workers.incarnations(incarnation)):
            await self.seal(name, "its process ended")

    async def seal(self, incarnation: str, why: str) -> None:
        """Declare a worker dead. It is removed when its reports are read to the seal, or at once."""
        if self.workers.state(incarnation) is WorkerState.REMOVED:  # it had sealed its own logs
            return
        log.warning("worker %s is sealed: %s", incarnation, why)
        if await self.workers.seal(incarnation):
            self.workers.inbox.follow(self.pool.keys.reports(incarnation))
        else:
            self.remove(incarnation)

    def remove(self, incarnation: str) -> None:
        """Remove a sealed worker whose reports were read."""
        held = self.scheduler.remove_worker(incarnation) + self.backlog.held_by.pop(incarnation, [])
        self.pending.defer(partial(self.remove_worker, incarnation, held))

    async def resume(self, sequences: list[Sequence]) -> list[Sequence]:
        """Resume requests that their workers hold no more. Return those that are live."""
        states = await committed.read(self.pool, [sequence.request_id for sequence in sequences])
        await self.save(states)
        return await self.enqueue(sequences, states)

    def dequeue_finished(self, sequences: list[Sequence]) -> ScriptAction:
        """Remove requests whose workers reported their ends. One that has no terminal is resumed: the worker
        was not allowed to end it.
        """

        def on_reply(flags: list[int]) -> list[Action]:
            for sequence, has_ended in zip(sequences, flags, strict=True):
                if has_ended:
                    self.on_dequeued(sequence)
            left = [one for one, has_ended in zip(sequences, flags, strict=True) if not has_ended]
            return [partial(self.resume, left)] if left else []

        return ScriptAction(lambda: self.dequeue_call(sequences), on_reply)

    async def restore(self, sequences: list[Sequence]) -> None:
        """Resume requests that their workers, from before this epoch, hold no more. Most have ended."""
        names = [sequence.request_id for sequence in sequences]
        states = await read_saved(self.pool, names, with_tokens=False)
        for sequence in await self.resume(await self.drop_ended(sequences, states)):
            self.timeline.record_takeover(sequence)

    async def enqueue_unheld(self, sequences: list[Sequence]) -> None:
        """Enqueue requests that no worker held: their strings have all of their tokens."""
        names = [sequence.request_id for sequence in sequences if sequence.attempt]
        states = await read_saved(self.pool, names)
        new = [sequence for sequence in sequences if not sequence.attempt]
        for sequence in new:
            self.scheduler.enqueue(sequence)
        for sequence in [*new, *await self.enqueue([one for one in sequences if one.attempt], states)]:
            self.timeline.record_takeover(sequence)

    async def remove_worker(self, incarnation: str, held: list[Sequence]) -> None:
        """Save the tokens in a sealed worker's log, resume the requests that it held, and delete its keys."""
        logged, why = await read_sealed_log(self.pool, incarnation)
        names = {tokens.request_id for tokens in logged} | {sequence.request_id for sequence in held}
        states = await read_saved(self.pool, names)
        for part in in_slices(logged, APPENDED_IN_ONE_SLICE):
            committed.append_tokens(part, states)
            await asyncio.sleep(0)
        await self.save(states, incarnation, is_crash=why == "died")
        live = await self.enqueue(held, states)
        await self.workers.remove_worker_keys(incarnation)
        self.timeline.record_death(incarnation, live)
        level = logging.INFO if why == "drained" else logging.WARNING
        log.log(level, "worker %s is removed; %s resumed", incarnation, plural(len(live), "request"))

    async def save(self, states: dict[str, Committed], worker: str = "", is_crash: bool = False) -> None:
        """Append to each request's string the tokens that only logs have, and record that `worker` (without
        it, any worker) holds the request no more. Raises LeaseLost.
        """
        for state in states.values():
            crash_count = state.crash_count + (is_crash and state.worker == worker)
            state.crash_count = 0 if state.num_tokens > state.base else crash_count  # of workers in a row
        for names in in_slices([name for name in states if states[name].is_live], SAVED_IN_ONE_CALL):
            requests = [saved_request(name, states[name], worker) for name in names]
            call = batcher_scripts.save_committed(
                self.pool.keys, own_epoch=self.scheduler.epoch, requests=requests
            )
            if await self.pool.run(call) != "OK":
                raise LeaseLost(f"epoch {self.scheduler.epoch} is over")

    async def enqueue(self, sequences: list[Sequence], states: dict[str, Committed]) -> list[Sequence]:
        """Update sequences to what is committed, and enqueue those that are live. Return the live ones."""
        live = await self.drop_ended(sequences, states)
        for sequence in live:
            if not sequence.waiting and sequence.row is None:
                sequence.commit(states[sequence.request_id].records)
                update(sequence, states[sequence.request_id])
                self.scheduler.resume(sequence)
        return live

    async def drop_ended(self, sequences: list[Sequence], states: dict[str, Committed]) -> list[Sequence]:
        """Remove those that have ended. Return the others."""
        for sequence in sequences:
            if not (state := states[sequence.request_id]).is_live:
                self.timeline.note_unseen_end(sequence, state)
                await self.dequeue(sequence)
        return [sequence for sequence in sequences if states[sequence.request_id].is_live]

    # --- ends of requests that no worker holds --------------------------------------------------------------

    async def finish(self, sequence: Sequence, why: str) -> None:
        """End a request that no worker holds. A terminal that it has already stays."""
        request = sequence.request
        await self.publish(request.request_id, request.channel, request.kept_ms, why, sequence.base)
        log.info(
            "request %s ended by the batcher: %s",
            request.request_id,
            why,
            extra=for_request(request.request_id, request.traceparent),
        )
        await self.dequeue(sequence)
        self.timeline.record(sequence, "ended", num_tokens=sequence.base, why=why)

    async def dequeue(self, sequence: Sequence) -> bool:
        """Remove a request from the queue and from the scheduler, if it has its terminal. Return whether it
        has.
        """
        if has_ended := await self.delete_entry(sequence.request_id, sequence.entry_id):
            self.on_dequeued(sequence)
        return has_ended

    def on_dequeued(self, sequence: Sequence) -> None:
        self.scheduler.forget(sequence)
        self.timeline.record_dequeued(sequence)

    async def replace_entry(self, sequence: Sequence, entry: StreamEntry) -> None:
        """Remove the entry of a live request that a gateway has queued again, after the broker lost it."""
        if sequence.entry_id != entry.id:
            await self.delete_entry("", sequence.entry_id)
        sequence.entry_id = entry.id

    async def finish_undecodable(self, entry: StreamEntry) -> None:
        """Remove an entry that is no valid request; publish a terminal if its request id can be read."""
        if (request_id := inbox.parse_request_id(entry.data)) is not None:
            channel: bytes | None = await self.pool.redis.hget(self.pool.keys.request(request_id), "channel")  # type: ignore[misc]
            await self.publish(
                request_id, (channel or b"").decode(), UNDECODABLE_RESULT_TTL_MS, "malformed", 0
            )
        await self.delete_entry(request_id or "", entry.id)

    async def publish(self, request_id: str, channel: str, kept_ms: int, why: str, num_tokens: int) -> None:
        terminal = terminal_for(request_id, why, num_tokens)
        number = self.channels.next_number(channel) if channel else 0
        events = Events(self.channels.source, number, terminals=[terminal])
        ended = batcher_scripts.finish(
            self.pool.keys, terminal, records=b"", kept_ms=kept_ms, channel=channel, payload=encode(events)
        )
        await self.pool.run(ended)

    async def delete_entry(self, request_id: str, entry_id: str) -> bool:
        call = batcher_scripts.dequeue(self.pool.keys, QueuedRequest(request_id, entry_id))
        return (await self.pool.run(call))[0]

    def dequeue_call(self, sequences: list[Sequence]) -> ScriptCall[list[bool]]:
        requests = [QueuedRequest(one.request_id, one.entry_id) for one in sequences]
        return batcher_scripts.dequeue(self.pool.keys, *requests)


def update(sequence: Sequence, state: Committed) -> None:
    sequence.attempt = state.attempt
    sequence.crash_count = state.crash_count
    if state.cancelled and not sequence.stop_reason:
        sequence.stop_reason = "client"


def saved_request(request_id: str, state: Committed, worker: str) -> SavedRequest:
    return SavedRequest(
        request_id,
        worker=worker or state.worker,
        attempt=state.attempt,
        crash_count=state.crash_count,
        offset=state.spilled_bytes,
        records=state.records[state.spilled_bytes :],
        num_speculated=state.num_speculated,
    )


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
