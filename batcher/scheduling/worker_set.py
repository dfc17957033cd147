"""WorkerSet: the workers that rows run on, which of them get new ones, and of which something has changed."""

from batcher.scheduling.placement import Placement
from batcher.scheduling.replica import Replica, WorkerLimits


class WorkerSet:
    """Nothing here walks all workers unless one comes or goes, or is told to.

    Attributes:
        replicas: by incarnation.
        closing: the whole pool was told to end, so no other worker will come for requests that wait.
        placement: those that may be given rows.
        changed: those of which something has changed since they were last asked for a plan.
        joined: those that have joined since somebody last looked.
        most_tokens: the longest request that one of them can hold.
    """

    def __init__(self, limits: WorkerLimits) -> None:
        self.replicas: dict[str, Replica] = {}
        self.closing = False
        self.placement = Placement(limits)
        self.changed: dict[Replica, None] = {}
        self.joined: list[Replica] = []
        self.most_tokens = 0

    def add(self, replica: Replica) -> None:
        self.replicas[replica.capacity.incarnation] = replica
        self.joined.append(replica)
        self.review()

    def remove(self, incarnation: str) -> Replica | None:
        """Remove and return a worker; None if it is not here."""
        if (replica := self.replicas.pop(incarnation, None)) is not None:
            self.changed.pop(replica, None)
            self.review()
        return replica

    def drain(self, incarnation: str) -> None:
        """Give the worker no new rows. Its own go to others; without one, clients' go on, jobs wait."""
        replica = self.replicas.get(incarnation)
        if replica is not None and not replica.draining:
            replica.draining = True
            self.review()

    def close(self) -> None:
        self.closing = True
        self.review()

    def review(self) -> None:
        """Find out which workers are given rows, and which give theirs away."""
        replicas = list(self.replicas.values())
        staying = [replica for replica in replicas if not replica.draining]
        for replica in replicas:
            replica.evacuates = replica.draining and bool(staying)
            if replica.draining:
                replica.due_stops.extend(replica.running)
            self.changed[replica] = None
        self.placement.set_open(staying or (replicas if self.closing else []))
        self.most_tokens = max((one.block_size * one.pool.num_blocks for one in replicas), default=0)

    def note_change(self, replica: Replica) -> None:
        """Note that rows or blocks of a worker have changed, or must. One that was removed gets no plan."""
        if self.replicas.get(replica.capacity.incarnation) is replica:
            self.changed[replica] = None
            self.placement.update(replica)

    def take_joined(self) -> list[Replica]:
        """Return the workers that have joined, and are still here, once."""
        joined, self.joined = self.joined, []
        return [replica for replica in joined if replica in self.replicas.values()]

    def take_changed(self) -> list[Replica]:
        """Return the workers of which something has changed, once."""
        changed, self.changed = list(self.changed), {}
        return changed
