"""Turn: where requests start in one turn of the scheduler, in which they come in order."""

from collections.abc import Iterator
from itertools import islice

from batcher.scheduling.placement import FEW
from batcher.scheduling.preemption import has_progressed, importance
from batcher.scheduling.replica import Replica
from batcher.scheduling.sequence import PlacedRow, Sequence
from batcher.scheduling.standby import max_standby, may_stand_by, standby_rows
from batcher.scheduling.worker_set import WorkerSet
from common.messages.service_class import LEAST_URGENT


class Turn:
    """One turn.

    Attributes:
        is_open: whether requests may stand by: nobody may behind one that waits for a place and may not
            stand by, or every place that a row leaves would be taken before it comes to that one.
    """

    def __init__(self, workers: WorkerSet) -> None:
        self.workers = workers
        self.placement = workers.placement
        self.is_open = True

    def choose(self, sequence: Sequence) -> tuple[Replica | None, PlacedRow | None]:
        """Return where a request starts, as `Placement.choose`; where it has no place at once, where batch
        rows leave it one, or else where it stands by.
        """
        replica, row = self.placement.choose(sequence)
        if replica is None:
            replica = self.make_room(sequence)
        if replica is None:
            self.is_open = self.is_open and may_stand_by(sequence)
            replica = next(self.able_to_hold(sequence), None)
        return replica, row

    def able_to_hold(self, sequence: Sequence) -> Iterator[Replica]:
        """Full workers where a request may stand by, first those where the fewest do."""
        num_places = self.placement.limits.max_batch_size
        for level in sorted(level for level in self.placement.levels if level >= num_places and self.is_open):
            for replica in islice(self.placement.levels[level], FEW):
                may_hold = replica.capacity.standby and level - num_places < max_standby(
                    num_places, replica.pace.ends_per_trip
                )
                if may_hold and replica.has_blocks(sequence):
                    yield replica

    def make_room(self, sequence: Sequence) -> Replica | None:
        """Have batch rows make room for a more urgent request. Return the worker where it takes the place of
        one at the same step boundary; None where it must wait until they have released their blocks, or where
        none can go.
        """
        if sequence.rank == LEAST_URGENT or sequence.crash_count:
            return None
        victim = sequence.victim
        has_victim = victim is not None and victim.sequence.row is victim
        for replica in list(islice(self.placement.with_batch, FEW)):
            takes_place = may_stand_by(sequence) and replica.capacity.standby and replica.has_blocks(sequence)
            may_wait = not has_victim and not any(row.stopping for row in replica.running)
            if not (takes_place or may_wait) or sequence.max_kv > replica.capacity.max_total_tokens:
                continue  # before all rows are looked at: several requests of each turn come here
            count, victims = rows_in_the_way(replica)
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


def rows_in_the_way(replica: Replica) -> tuple[int, list[PlacedRow]]:
    """Return how many rows must stop before one more has a place, and the batch rows that may: first those
    that stand by, then, the youngest request first, those that have filled a block since they started.
    """
    num_stopping = sum(bool(row.stopping) for row in replica.running)
    count = max(0, replica.num_due - num_stopping + 1 - replica.limits.max_batch_size)
    able = [row for row in replica.batch_rows if not (row.stopping or row.sequence.stays)]
    waiting = set(standby_rows(replica))
    standing_by = [row for row in able if row in waiting]
    running = [row for row in able if row not in waiting and has_progressed(replica, row)]
    return count, standing_by + sorted(running, key=importance, reverse=True)
