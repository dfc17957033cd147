"""Preemption and standby: which rows give way when blocks run out, and which wait beside a full batch.

Rows keep their blocks by the class of their request, then by the request's age; a resumed row is young, and
by its own age it would be the next to go again. A row stays until it has filled a block, so every attempt
brings a request on.

A row that stands by takes the place of a row that ends, at the same step boundary and without a plan. To a
worker, the rows after the first `Plan.max_rows` that have not ended stand by. Like other rows without KV they
are stopped, adopted and resumed.
"""

import math
from itertools import islice

from batcher.scheduling.placement import MAX_COMPARED, WorkerSet
from batcher.scheduling.replica import Replica
from batcher.scheduling.sequence import PREEMPT, PlacedRow, Sequence

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
