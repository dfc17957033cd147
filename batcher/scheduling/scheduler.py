"""Scheduler: decides which request runs on which worker.

It is a pure function of requests, reports, limits and the time it is given: no I/O, no clock, no torch. The
loop tells it what happened and asks for plans. What needs I/O is left in `outcomes`.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from batcher.scheduling.hand_over import HandOver, adopt_rows
from batcher.scheduling.placement import Turn, WorkerSet, move_interrupted, move_standby
from batcher.scheduling.plan_builder import PendingPlan, next_plan, set_lengths
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.request_queue import RequestQueue
from batcher.scheduling.sequence import PREEMPT, PlacedRow, Sequence
from common.messages.events import INTERRUPTED
from common.messages.plan import Report, WorkerCapacity
from common.messages.request import LEAST_URGENT

MAX_CRASHES = 3
"""A request fails after this many worker deaths in a row without a new committed token; two may be
coincidence.
"""
CALLERS_MS = 60_000
"""Callers are about for so long after the last request that is more urgent than the class `batch`."""


@dataclass(slots=True)
class Outcomes:
    """What the loop must do for the scheduler.

    Attributes:
        finished: sequences whose terminal is published; their queue entries must go.
        to_finish: (sequence, why) of sequences that no worker holds; the batcher publishes their terminal.
        interrupted: sequences whose row ended early; they go on once their committed tokens are read.
    """

    finished: list[Sequence] = field(default_factory=list)
    to_finish: list[tuple[Sequence, str]] = field(default_factory=list)
    interrupted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching over the workers of one pool.

    Attributes:
        sequences: every live request, by id.
        gateways: gateway → number of live requests that it has sent.
        replicas: every worker of the pool, by incarnation.
        queue: the requests that wait, in order.
        deadlines: a heap of (deadline in ms, request id).
        now_ms, called_ms: the pool's clock, as last told, and when the last request was queued that is more
            urgent than the class `batch`.
    """

    def __init__(self, limits: WorkerLimits, epoch: int, weights: Mapping[str, float] | None = None) -> None:
        self.limits = limits
        self.epoch = epoch
        self.sequences: dict[str, Sequence] = {}
        self.gateways: Counter[str] = Counter()
        self.workers = WorkerSet(limits)
        self.replicas = self.workers.replicas
        self.hand_over = HandOver(self.workers)
        self.queue = RequestQueue(weights or {})
        self.deadlines: list[tuple[int, str]] = []
        self.now_ms = 0
        self.called_ms = -CALLERS_MS
        self.outcomes = Outcomes()

    def register(self, sequence: Sequence) -> None:
        """Add a live request; `enqueue` or `resume` puts it in the queue."""
        self.sequences[sequence.request_id] = sequence
        self.gateways[sequence.request.gateway] += 1
        heapq.heappush(self.deadlines, (sequence.deadline_ms, sequence.request_id))
        if sequence.class_index < LEAST_URGENT:
            self.called_ms = max(self.called_ms, sequence.queued_ms)

    @property
    def has_callers(self) -> bool:
        """Whether requests more urgent than the class `batch` have come of late."""
        return self.now_ms - self.called_ms < CALLERS_MS

    def enqueue(self, sequence: Sequence) -> None:
        """Have a request wait, unless its id is another request's by now."""
        if self.sequences.get(sequence.request_id, sequence) is not sequence:
            return
        if sequence.stop_reason or sequence.crash_count >= MAX_CRASHES:
            self.outcomes.to_finish.append((sequence, sequence.stop_reason or "poison"))
            return
        sequence.waiting = True
        sequence.follows = None
        sequence.refused_at = 0
        self.queue.add(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Enqueue an interrupted request before the new ones of its class."""
        if sequence.waiting or sequence.row is not None:
            return
        sequence.resumed = True
        self.enqueue(sequence)

    def pop_outcomes(self) -> Outcomes:
        outcomes, self.outcomes = self.outcomes, Outcomes()
        return outcomes

    def cancel(self, request_id: str, why: str) -> None:
        """End a request: at once if it waits; through its worker if it runs."""
        sequence = self.sequences.get(request_id)
        if sequence is None or sequence.stop_reason:
            return
        sequence.stop_reason = why
        if sequence.waiting:
            sequence.waiting = False
            self.outcomes.to_finish.append((sequence, why))
        elif sequence.row is not None:
            self.stop(sequence.row)

    def stop(self, row: PlacedRow) -> None:
        """Have the next plan of a row's worker stop the row, if it must stop."""
        replica = self.replicas[row.worker]
        replica.due_stops.append(row)
        self.workers.note_change(replica)

    def restart(self, request_id: str) -> None:
        """Stop a request where it runs or waits; it goes on from its committed tokens."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return
        if sequence.waiting:
            sequence.waiting = False
            self.outcomes.interrupted.append(sequence)
        elif sequence.row is not None and not sequence.row.stopping:
            sequence.row.stopping = PREEMPT
            self.stop(sequence.row)

    def expire(self, now_ms: int) -> None:
        """End every request whose deadline has passed, with another error if it never started."""
        self.now_ms = now_ms
        while self.deadlines and self.deadlines[0][0] <= now_ms:
            request_id = heapq.heappop(self.deadlines)[1]
            sequence = self.sequences.get(request_id)
            if sequence is not None and sequence.deadline_ms <= now_ms:  # else it was an earlier one's
                self.cancel(request_id, "timeout" if sequence.attempt else "expired")
        if len(self.deadlines) > 2 * len(self.sequences) + 1000:
            self.deadlines = [(sequence.deadline_ms, name) for name, sequence in self.sequences.items()]
            heapq.heapify(self.deadlines)

    def left_ms(self, now_ms: int, at_most: int) -> int:
        """Return the milliseconds until the next deadline, at most `at_most`."""
        return min(at_most, self.deadlines[0][0] - now_ms) if self.deadlines else at_most

    def forget(self, sequence: Sequence) -> None:
        """Drop a request that has its terminal."""
        if self.sequences.get(sequence.request_id) is sequence:
            del self.sequences[sequence.request_id]
            sequence.waiting = False
            gateway = sequence.request.gateway
            self.gateways[gateway] -= 1
            if not self.gateways[gateway]:
                del self.gateways[gateway]

    def add_worker(
        self, capacity: WorkerCapacity, report: Report, sequences: list[Sequence]
    ) -> list[Sequence]:
        """Add a worker that answered the takeover. Return the `sequences` that it holds no more.

        Raises ValueError if the report contradicts itself.
        """
        replica = Replica(capacity, self.limits)
        left = adopt_rows(replica, report, sequences)
        self.workers.add(replica)
        return left

    def remove_worker(self, incarnation: str) -> list[Sequence]:
        """Remove a sealed worker. Return the requests that it held."""
        if (replica := self.workers.remove(incarnation)) is None:
            return []
        for row in replica.rows.values():
            self.queue.correct_charge(row, row.kv_at(replica.step, replica.step) if row.is_prefilled else 0)
        held = list(replica.running)
        for row in held:
            row.sequence.row = None
            self.release_followers(replica, row)
        return [row.sequence for row in held]

    def withdraw(self, pending: PendingPlan, positions: Iterable[int]) -> list[PlacedRow]:
        """Remove rows from a plan that was not published, as if they had never been placed. Return them."""
        withdrawn = [pending.rows[position] for position in positions]
        numbers = {row.number for row in withdrawn}
        pending.rows = [row for row in pending.rows if row.number not in numbers]
        starts = [start for start in pending.plan.starts if start.row not in numbers]
        pending.plan = replace(pending.plan, starts=starts)
        for row in withdrawn:
            pending.replica.withdraw(row)
            self.queue.correct_charge(row, 0)
            self.release_followers(pending.replica, row)
        self.workers.note_change(pending.replica)
        return withdrawn

    def release_followers(self, replica: Replica, row: PlacedRow) -> None:
        """Enqueue the requests that have waited for a row's prompt."""
        for sequence in replica.take_followers(row) if row.followers else ():
            self.enqueue(sequence)

    def apply_report(self, incarnation: str, report: Report) -> None:
        """Update the rows of a worker from its report."""
        replica = self.replicas[incarnation]
        replica.pace.add(report, max(0, report.step - replica.step))
        replica.step = max(replica.step, report.step)
        replica.acknowledged = report.sequence
        replica.plan_seen = max(replica.plan_seen, report.plan)
        replica.pool.cache.note_snapshots(report.snapshots)
        for number, kv_len, step in report.prefilled:
            if (row := replica.rows.get(number)) is not None:
                replica.on_prefilled(row, kv_len, step)
                self.release_followers(replica, row)
        set_lengths(replica, report.lengths)
        for number, why, end in report.ended:
            if (row := replica.rows.get(number)) is not None and not row.ended:
                replica.end_row(row)
                self.release_followers(replica, row)
                self.queue.learn(row.sequence, end - row.sequence.base)
                ended = self.outcomes.interrupted if why in INTERRUPTED else self.outcomes.finished
                ended.append(row.sequence)
        hashes = dict(report.hashes)
        for number, kv_len in report.released:
            if (row := replica.rows.get(number)) is not None:
                self.queue.correct_charge(row, kv_len)
            replica.release(number, kv_len, hashes.get(number, b""))
        self.workers.note_change(replica)

    def set_adapters(self, incarnation: str, adapters: frozenset[str]) -> None:
        """Note which adapters a worker has loaded."""
        replica = self.replicas.get(incarnation)
        if replica is not None and replica.adapters != adapters:
            replica.adapters = adapters
            for adapter in [one for one in replica.recent if one not in adapters]:
                del replica.recent[adapter]
            self.workers.note_change(replica)

    def plans(self) -> Iterator[PendingPlan]:
        """Yield a plan for each worker that needs one."""
        self.hand_over.stop_rows(self.sequences)
        placed = self.place_waiting()
        move_standby(self.workers)
        move_interrupted(self.workers)
        for replica in self.workers.take_changed():
            rows = placed.get(replica, [])
            if (plan := next_plan(replica, self.epoch, rows, self.has_callers)) is not None:
                yield PendingPlan(replica, plan, rows, replica.joins)
            if replica.due_stops:  # a row that starts with this plan is stopped by the next
                self.workers.note_change(replica)

    def place_waiting(self) -> dict[Replica, list[PlacedRow]]:
        """Start waiting requests in order, each on a worker that can take it."""
        placed: dict[Replica, list[PlacedRow]] = {}
        turn = Turn(self.workers)
        while (sequence := self.queue.first()) is not None:
            if self.replicas and not self.workers.can_ever_hold(sequence):
                sequence.waiting = False
                self.outcomes.to_finish.append((sequence, "capacity"))
            elif self.may_not_start(sequence):
                self.queue.skip(sequence)
            else:
                self.place(sequence, turn, placed)
        self.queue.end_turn()
        return placed

    def may_not_start(self, sequence: Sequence) -> bool:
        """Whether a request waits for something else than room: a job for the next worker, since the pool
        closes; a new request for the rows that are on their way; one with an adapter for a worker that has
        loaded it.
        """
        waits_for_worker = self.workers.closing and not sequence.request.gateway
        adapter = sequence.request.adapter
        waits_for_adapter = bool(adapter) and not self.workers.placement.holds(adapter)
        return waits_for_worker or waits_for_adapter or self.hand_over.holds_back(sequence)

    def place(self, sequence: Sequence, turn: Turn, placed: dict[Replica, list[PlacedRow]]) -> None:
        """Start the first request of the queue, or have it wait for a row, or for room."""
        replica, row = turn.choose(sequence)
        if replica is None:
            (self.queue.skip if sequence.crash_count else self.queue.look_past)(sequence)
            return
        if row is not None:
            self.queue.set_aside(sequence)
            replica.wait_for_prefill(row, sequence)
        else:
            row = replica.start(sequence)
            row.charged = self.queue.start(sequence, sequence.num_known - row.num_cached)
            placed.setdefault(replica, []).append(row)
        self.workers.note_change(replica)
