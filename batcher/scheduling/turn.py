"""Turn: where requests start in one turn of the scheduler, and which rows make room for them."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice

from batcher.scheduling.placement import MAX_COMPARED, WorkerSet
from batcher.scheduling.preemption import has_progressed, importance, max_standby, may_stand_by, standby_rows
from batcher.scheduling.replica import Replica
from batcher.scheduling.sequence import PlacedRow, Sequence
from common.messages.request import LEAST_URGENT


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
