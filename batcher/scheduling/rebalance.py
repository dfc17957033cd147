"""Rebalance: interrupted answers that wait for their prefill go to a worker that has joined.

When a worker dies, its rows start at once on those that are there, and wait for each other. Its successor
comes seconds later, when no request waits for a place any more.
"""

from batcher.scheduling.replica import Replica
from batcher.scheduling.sequence import PlacedRow
from batcher.scheduling.worker_set import WorkerSet


def move_interrupted(workers: WorkerSet) -> None:
    """Stop the share of workers that have joined, and have no rows, in the rows that wait elsewhere: they
    start there then.
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
    """The rows that others should have: their share of those that wait, of which it has the longest: an
    engine computes the others first.
    """
    waiting = [row for row in replica.running if row.was_interrupted and not row.stopping]
    waiting.sort(key=lambda row: -row.sequence.num_known)
    return waiting[: int(share * len(waiting))]
