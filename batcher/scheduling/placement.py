"""Placement: which of the workers that can start a request gets it.

What it costs to place a request grows neither with the number of workers nor with that of their rows: workers
are kept by their number of rows, and a request that found no room is tried on those that changed since.

WorkerSet: the workers that rows run on, which of them get new ones, and of which something has changed.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import islice

from batcher.scheduling.kv_blocks import PrefixCache, PrefixIndex
from batcher.scheduling.pace import LEAST_HORIZON
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.sequence import PlacedRow, Sequence
from common.messages.block_hashes import HASHED_TOKENS

SPREAD = 1.25
"""A worker gets no row for what it has cached if it has so many times the mean number of rows."""
ROW_TOKENS = 32
"""A row more weighs as much as so many tokens of the prompt that must be computed."""
FEW = 8
"""Workers that are compared for one request, of those with equally many rows, and of those that share."""
WORTH_WAITING = 32
"""A request waits for a row that computes so many tokens which it needs, too."""
RECENT = 64
"""After so many changes of workers the `refusal` is forgotten."""


def find_known(replica: Replica, sequence: Sequence, waits: bool) -> tuple[int, PlacedRow | None]:
    """Return how many tokens of a request a worker has computed, and no row. Where the request `waits` for
    what rows compute, and that is much: how many tokens it will find, and the row that computes the last.
    """
    here, end, row = replica.pool.cache.find_expected(replica.names(sequence))
    if waits and (end - here) * replica.block_size >= WORTH_WAITING:
        return end * replica.block_size, row
    return here * replica.block_size, None


def is_as_large(tokens: tuple[float, float], others: tuple[float, float]) -> bool:
    """Whether a request needs at least as many tokens as another at the shortest horizon and at the longest:
    so it does at all between them.
    """
    return tokens[0] >= others[0] and tokens[1] >= others[1]


class Placement:
    """The workers that may be given rows.

    Attributes:
        levels: by number of rows: the workers that have so many.
        with_batch: those of them with rows of the class `batch`, the one that changed last at the end.
        changes: number of the last change of each worker, the newest last.
        refusal: tokens, at the shortest and the longest horizon, that no worker had room for, and the number
            of the last change before that.
    """

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        self.index = PrefixIndex()
        self.replicas: dict[PrefixCache, Replica] = {}
        self.rows: dict[Replica, int] = {}
        self.levels: dict[int, dict[Replica, None]] = {}
        self.num_rows = 0
        self.with_batch: dict[Replica, None] = {}
        self.block_size = 1
        self.changes: OrderedDict[Replica, int] = OrderedDict()
        self.num_changes = 0
        self.refusal = ((math.inf, math.inf), 0)

    def set_open(self, replicas: Collection[Replica]) -> None:
        """Give rows to these workers, and to no others."""
        for replica in [one for one in self.rows if one not in replicas]:
            replica.pool.cache.leave_index()
            self.move(replica, None)
            self.with_batch.pop(replica, None)
            del self.rows[replica], self.changes[replica], self.replicas[replica.pool.cache]
        self.block_size = max((replica.block_size for replica in replicas), default=1)
        for replica in replicas:
            if replica not in self.rows:
                replica.pool.cache.join_index(self.index)
                self.replicas[replica.pool.cache] = replica
                self.rows[replica] = 0
                self.update(replica)

    def update(self, replica: Replica) -> None:
        """Note that a worker's rows or blocks have changed."""
        if replica in self.rows:
            self.num_changes += 1
            self.changes[replica] = self.num_changes
            self.changes.move_to_end(replica)
            self.move(replica, replica.num_due)
            self.with_batch.pop(replica, None)
            if replica.batch_rows:
                self.with_batch[replica] = None

    def move(self, replica: Replica, num_rows: int | None) -> None:
        before = self.rows[replica]
        if (level := self.levels.get(before)) is not None:
            level.pop(replica, None)
            if not level:
                del self.levels[before]
        self.num_rows -= before
        if num_rows is not None:
            self.rows[replica] = num_rows
            self.num_rows += num_rows
            self.levels.setdefault(num_rows, {})[replica] = None

    def choose(self, sequence: Sequence, knowing: list[Replica]) -> tuple[Replica | None, PlacedRow | None]:
        """Return the worker that has most of the request computed, of those `knowing` its beginning, unless
        others have far fewer rows; None if none can start it. With it comes a row if the request should start
        when that has computed its prompt.

        While another worker can start it, a request goes to none with more rows than its share (SPREAD),
        whatever is cached there; and while a worker has no rows, it waits for no row. Choices of one answer
        are the exception: they stay together for the prompt that they share.
        """
        fewest = self.fewest_rows(sequence)
        sharing = [replica for replica in knowing if replica.can_start(sequence)]
        if not sharing:
            return fewest, None
        num_siblings = sequence.request.num_choices - 1
        waits = num_siblings > 0 or fewest is None or fewest.num_due > 0
        most = math.ceil(SPREAD * (self.num_rows + 1) / len(self.rows)) + num_siblings
        weight = 0 if num_siblings else ROW_TOKENS

        def cost(replica: Replica) -> tuple[int, tuple[int, int]]:
            return weight * replica.num_due - find_known(replica, sequence, waits)[0], replica.load

        able = [replica for replica in sharing if replica.num_due < most]
        best = min([*able, fewest] if fewest else able or sharing, key=cost)
        return best, find_known(best, sequence, waits)[1]

    def fewest_rows(self, sequence: Sequence) -> Replica | None:
        """Return a worker with the fewest rows of those that can start a request, and of some of them the one
        with the most free blocks. Where there was no room before, only workers that have changed are tried.
        """
        longest = self.limits.max_horizon
        tokens = sequence.kv_ahead(min(LEAST_HORIZON, longest)), sequence.kv_ahead(longest)
        refused_at = self.refused_at(sequence, tokens)
        found = self.first_changed(sequence, refused_at) if refused_at else self.first_able(sequence)
        if found is None:
            self.note_refusal(sequence, tokens)
        return found

    def refused_at(self, sequence: Sequence, tokens: tuple[float, float]) -> int:
        """Return the number of the change at which no worker had room for a request, or for one that needs no
        more; 0 if that is not known. A suspect is always tried anew: it waits for more than room.
        """
        if sequence.crash_count:
            return 0
        if not sequence.refused_at and is_as_large(tokens, self.refusal[0]):
            return self.refusal[1]
        return sequence.refused_at

    def note_refusal(self, sequence: Sequence, tokens: tuple[float, float]) -> None:
        """Note that no worker has room for a request. The smallest such request speaks for others, too."""
        sequence.refused_at = self.num_changes
        is_smaller = is_as_large(self.refusal[0], tokens)
        is_old = self.num_changes - self.refusal[1] > RECENT
        if (is_smaller or is_old) and not sequence.crash_count:
            self.refusal = tokens, self.num_changes

    def first_changed(self, sequence: Sequence, behind: int) -> Replica | None:
        """Return the least loaded worker that can start a request, of those changed behind a change."""
        by_load = sorted(self.changed(behind), key=lambda replica: replica.load)
        return next((replica for replica in by_load if replica.can_start(sequence)), None)

    def first_able(self, sequence: Sequence) -> Replica | None:
        """Return a worker that can start a request, of the lowest level that has one."""
        for level in self.levels_in_order():
            able = (replica for replica in self.levels.get(level, ()) if replica.can_start(sequence))
            if found := list(islice(able, FEW)):
                return min(found, key=lambda replica: replica.load)
        return None

    def levels_in_order(self) -> Iterator[int]:
        """The first nearly always has room: the others are sorted where it has not."""
        lowest = min(self.levels, default=0)
        yield lowest
        yield from sorted(self.levels.keys() - {lowest})

    def changed(self, behind: int) -> Iterator[Replica]:
        """Workers that have changed behind the change with this number."""
        for replica, number in reversed(self.changes.items()):
            if number <= behind:
                return
            yield replica

    def knowing(self, sequence: Sequence) -> list[Replica]:
        """Some workers that know the beginning of a request; first those that know most of it."""
        if not sequence.block_hashes or not self.index.first:
            return []
        found: dict[Replica, None] = {}
        for name in reversed(sequence.names(HASHED_TOKENS)):
            for cache in islice(self.index.holders(name), FEW):
                found[self.replicas[cache]] = None
            if len(found) >= FEW:
                break
        return list(found)


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

    def set_closing(self) -> None:
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
