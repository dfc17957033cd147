"""Preemption: which row of a worker gives up its blocks when they run out. Pure functions of a replica.

Rows keep their blocks by the class of their request, then by its age. That is the age of the request, not of
the row: a row that resumes is young, and would be the next to go again. A row that was started stays until it
has filled a block of its own, so every stay on a worker brings a request on, however scarce blocks are.

Standby: rows that a worker holds beside a full batch. Each takes the place of a row that ends at the same
step boundary, without a plan.

To a worker, rows behind the first `max_rows` of those that have not ended stand by (`Plan.max_rows`); in all
else they are rows whose prompt is not computed: they are stopped, adopted and resumed like these. Which of
them have a place by now, the batcher knows when it hears what has ended.
"""

import math
from itertools import islice

from batcher.scheduling.placement import FEW, WorkerSet
from batcher.scheduling.replica import Replica
from batcher.scheduling.sequence import PREEMPT, PlacedRow, Sequence

LEAST_PLACES = 16
"""In a small batch it is long until a row ends: whoever stands by would hold up requests that are more
urgent.
"""
PLACES_OF_ONE = 2
"""One row stands by for so many places at most."""


def max_standby(num_places: int, ends_per_trip: float) -> int:
    """How many rows may stand by on a worker with so many places: nearly always as many as end until the
    batcher can answer an end.
    """
    if num_places < LEAST_PLACES:
        return 0
    return min(num_places // PLACES_OF_ONE, max(1, math.ceil(ends_per_trip + math.sqrt(ends_per_trip))))


def standby_rows(replica: Replica) -> list[PlacedRow]:
    """Rows that have no place, as far as the worker has reported, but those that are asked to stop: whoever
    comes behind one of these takes its place.
    """
    num_places = replica.limits.max_batch_size
    if replica.num_running <= num_places:
        return []
    return [row for row in replica.running if not row.stopping][num_places:]


def may_stand_by(sequence: Sequence) -> bool:
    """Whether a request may do so on any worker. A suspect may not: when the worker dies, a crash is counted
    for rows that stand by as well. Choices of one answer wait until their prompt is computed.
    """
    return not sequence.crash_count and sequence.request.num_choices == 1


def move_standby(workers: WorkerSet) -> None:
    """Stop rows that stand by while another worker has a place for them, where they start then; at most one
    of a worker, of some of those that have most rows.
    """
    placement = workers.placement
    num_places = placement.limits.max_batch_size
    most, fewest = max(placement.levels, default=0), min(placement.levels, default=0)
    if most <= num_places or fewest >= num_places:
        return
    for replica in list(islice(placement.levels[most], FEW)):
        rows = standby_rows(replica)
        is_moving = any(row.stopping == PREEMPT for row in islice(replica.running, num_places, None))
        if rows and not is_moving and placement.fewest_rows(rows[-1].sequence) is not None:
            replica.preempt(rows[-1])
            workers.note_change(replica)


def importance(row: PlacedRow) -> tuple[int, int]:
    """Smaller keeps its blocks longer."""
    return row.sequence.class_index, row.sequence.arrival


def preempt_for(replica: Replica, row: PlacedRow) -> None:
    """Preempt a row that stands by, or the least important one of those that are less so than `row`, which
    lacks blocks.

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
    enough = min(row.sequence.num_known + replica.block_size, len(row.blocks) * replica.block_size)
    return row.is_prefilled and filled >= enough
