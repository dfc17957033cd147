"""Turn: where requests start in one turn of the scheduler, which rows give way when blocks run out, and which
wait beside a full batch.

Rows keep their blocks by the class of their request, then by the request's age; a resumed row is young, and
by its own age it would be the next to go again. A row stays until it has filled a block, so every attempt
brings a request on.

A row that stands by takes the place of a row that ends, at the same step boundary and without a plan. To a
worker, the rows after the first `Plan.max_rows` that have not ended stand by. Like other rows without KV they
are stopped, adopted and resumed.
"""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice

from batcher.scheduling.placement import MAX_COMPARED, WorkerSet
from batcher.scheduling.replica import Replica
from batcher.scheduling.sequence import PREEMPT, PlacedRow, Sequence
from common.messages.request import LEAST_URGENT

LEAST_PLACES = 16
"""Least batch beside which rows stand by. In a smaller one it takes long until a row ends, so a row that
stands by would delay more urgent requests.
"""
PLACES_PER_STANDBY = 2
"""Places of the batch for each row that stands by, at least."""


def max_standby(num_places: int, ends_per_trip: float) -> int:
    """Return how many rows may stand by beside `num_places`: nearly always as many as end before the batcher
    can answer an end.
    """
    if num_places < LEAST_PLACES:
        return 0
    return min(num_places // PLACES_PER_STANDBY, max(1, math.ceil(ends_per_trip + math.sqrt(ends_per_trip))))


def standby_rows(replica: Replica) -> list[PlacedRow]:
    """Return the rows without a place, as far as the worker has reported. A row that is asked to stop does
    not
    count: the next row takes its place.
    """
    num_places = replica.limits.max_batch_size
    if replica.num_running <= num_places:
        return []
    return replica.split_rows(row for row in replica.running if not row.stopping)[1]


def may_stand_by(sequence: Sequence) -> bool:
    """Whether a request may stand by on any worker. A suspect may not: a death of the worker would count
    against it. Choices of one answer may not: they wait until their prompt is computed. A beam search may
    not: it would need the places of several rows that end.
    """
    request = sequence.request
    return not sequence.crash_count and request.num_choices == 1 and request.beams is None


def move_standby(workers: WorkerSet) -> None:
    """Stop rows that stand by while another worker has a place for them: they start there. At most one row of
    a worker is stopped, on some of the workers with the most rows.
    """
    placement = workers.placement
    num_places = placement.limits.max_batch_size
    most, fewest = max(placement.levels, default=0), min(placement.levels, default=0)
    if most <= num_places or fewest >= num_places:
        return
    for replica in list(islice(placement.levels[most], MAX_COMPARED)):
        rows = standby_rows(replica)
        is_moving = any(row.stopping == PREEMPT for row in replica.split_rows(replica.running)[1])
        if rows and not is_moving and placement.fewest_rows(rows[-1].sequence) is not None:
            replica.preempt(rows[-1])
            workers.note_change(replica)


def importance(row: PlacedRow) -> tuple[int, int]:
    """Order of rows: a row with a smaller value keeps its blocks longer."""
    return row.sequence.class_index, row.sequence.arrival


def preempt_for(replica: Replica, row: PlacedRow) -> None:
    """Preempt a row for `row`, which lacks blocks: one that stands by, or else the least important one.

    Nothing is preempted while another row is stopping: its blocks are free once it is released.
    """
    if replica.leaving or any(other.stopping or other.ended for other in replica.rows.values()):
        return
    victims = standby_rows(replica) or [
        other
        for other in replica.running
        if importance(other) > importance(row) and has_progressed(replica, other)
    ]
    if victims:
        replica.preempt(max(victims, key=importance))


def has_progressed(replica: Replica, row: PlacedRow) -> bool:
    """Whether a row has filled a block since it started, or all that it has."""
    filled = row.kv_at(replica.step, replica.step)
    sequence, block_size = row.sequence, replica.block_size
    enough = min(sequence.num_known + block_size, sequence.kv_room(len(row.blocks), block_size))
    return row.is_prefilled and filled >= enough


def move_interrupted(workers: WorkerSet) -> None:
    """Move interrupted answers that wait for their prefill to workers that have joined and have no rows.

    When a worker dies, its requests start at once on the others, and wait for each other there. Its successor
    joins seconds later, when no request waits for a place any more.
    """
    joined = [replica for replica in workers.take_joined() if not (replica.num_due or replica.draining)]
    if not joined:
        return
    share = len(joined) / len(workers.replicas)
    for replica in workers.replicas.values():
        if rows := movable(replica, share):
            for row in rows:
                replica.preempt(row)
            workers.note_change(replica)


def movable(replica: Replica, share: float) -> list[PlacedRow]:
    """Return a worker's share of waiting rows that others should have. They are the longest ones: the engine
    computes the others first.
    """
    waiting = [row for row in replica.running if row.was_interrupted and not row.stopping]
    waiting.sort(key=lambda row: -row.sequence.num_known)
    return waiting[: int(share * len(waiting))]


class Turn:
    """One turn.

    Attributes:
        allows_standby: whether requests may stand by. They may not once a request waits that may not stand by
            itself: they would take each place that becomes free before it does.
        promised: worker → places of preempted rows for which requests still wait.
    """

    def __init__(self, workers: WorkerSet) -> None:
        self.workers = workers
        self.placement = workers.placement
        self.allows_standby = True
        self.promised: Counter[Replica] = Counter()

    def choose(self, sequence: Sequence) -> tuple[Replica | None, PlacedRow | None]:
        """Return where a request starts, as `Placement.choose` does. If no worker has a place for it, it
        starts where batch rows make room, or else stands by.
        """
        knowing = self.placement.knowing(sequence)
        replica, row = self.placement.choose(sequence, knowing)
        if replica is None:
            replica = self.make_room(sequence, knowing)
        if replica is None:
            self.allows_standby = self.allows_standby and may_stand_by(sequence)
            replica = next(self.able_to_hold(sequence, knowing), None)
        if replica is None and sequence.victim and sequence.has_victim:
            self.promised[self.workers.replicas[sequence.victim.worker]] += sequence.num_places
        return replica, row

    def able_to_hold(self, sequence: Sequence, knowing: list[Replica]) -> Iterator[Replica]:
        """Yield full workers where a request may stand by: first those that know its beginning, then those
        where the fewest rows stand by.
        """
        num_places = self.placement.limits.max_batch_size
        full = (
            sorted(level for level in self.placement.levels if level >= num_places)
            if self.allows_standby
            else []
        )
        fewest = (replica for level in full for replica in islice(self.placement.levels[level], MAX_COMPARED))
        for replica in chain(knowing if full else (), fewest):
            num_standby = replica.num_due - num_places
            may_hold = replica.capacity.standby and 0 <= num_standby < max_standby(
                num_places, replica.pace.ends_per_trip
            )
            if may_hold and replica.has_room(sequence):
                yield replica

    def make_room(self, sequence: Sequence, knowing: list[Replica]) -> Replica | None:
        """Have batch rows make room for a more urgent request, preferably where its beginning is known.
        Return the worker where it takes a row's place at the same step boundary. Return None if it must wait
        until rows have released their blocks, or if none can go.
        """
        if sequence.class_index == LEAST_URGENT or sequence.crash_count:
            return None
        has_victim = sequence.has_victim
        with_batch = self.placement.with_batch
        known = (replica for replica in knowing if replica in with_batch)
        for replica in dict.fromkeys((*known, *islice(with_batch, MAX_COMPARED))):
            takes_place = may_stand_by(sequence) and replica.capacity.standby and replica.has_room(sequence)
            may_wait = not has_victim and not any(row.stopping for row in replica.running)
            is_able = replica.can_serve(sequence) and replica.can_ever_hold(sequence)
            if not (takes_place or may_wait) or not is_able:
                continue  # before all rows are walked: several requests come here in each turn
            count, victims = rows_in_the_way(replica, self.promised[replica], sequence.num_places)
            if count > len(victims):
                continue
            if takes_place:
                self.preempt(replica, victims[:count])
                return replica
            if victims and may_wait:
                self.preempt(replica, victims[: max(1, count)])
                sequence.victim = victims[0]
                return None
        return None

    def preempt(self, replica: Replica, victims: list[PlacedRow]) -> None:
        for row in victims:
            replica.preempt(row)
        self.workers.note_change(replica)


def rows_in_the_way(
    replica: Replica, num_promised: int = 0, num_places: int = 1
) -> tuple[int, list[PlacedRow]]:
    """Return how many rows must stop before one more has its places beside the promised ones, and the batch
    rows that may stop: first those that stand by, then those that have filled a block, youngest request
    first. It is more rows than there are if all of them together do not suffice.
    """
    num_staying = replica.num_due - sum(row.sequence.num_places for row in replica.running if row.stopping)
    missing = num_staying + num_promised + num_places - replica.limits.max_batch_size
    able = [row for row in replica.batch_rows if not (row.stopping or row.sequence.stays)]
    waiting = set(standby_rows(replica))
    standing_by = [row for row in able if row in waiting]
    running = [row for row in able if row not in waiting and has_progressed(replica, row)]
    victims = standing_by + sorted(running, key=importance, reverse=True)
    count = 0
    while missing > 0:
        missing -= victims[count].sequence.num_places if count < len(victims) else missing
        count += 1
    return count, victims
