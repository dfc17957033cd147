"""Preemption: which row of a worker gives up its blocks when they run out. Pure functions of a replica.

Rows keep their blocks by the class of their request, then by its age. That is the age of the request, not of
the row: a row that resumes is young, and would be the next to go again. A row that was started stays until it
has filled a block of its own, so every stay on a worker brings a request on, however scarce blocks are.
"""

from batcher.scheduling.replica import Replica
from batcher.scheduling.sequence import PlacedRow
from batcher.scheduling.standby import standby_rows


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
