"""Placement: the workers of the pool, and which of them gets a request.

The cost of placing a request grows neither with the number of workers nor with the number of their rows.
Workers are kept by their number of rows, and a request that found no room is tried only on workers that have
changed since.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import islice

from batcher.scheduling.kv_blocks import PrefixCache, PrefixIndex
from batcher.scheduling.replica import LEAST_HORIZON, Replica, WorkerLimits
from batcher.scheduling.sequence import PlacedRow, Sequence
from common.messages.request import HASHED_TOKENS

MAX_SPREAD = 1.25
"""Most rows of a worker that gets a request for what it has cached, as a multiple of the mean."""
ROW_TOKENS = 32
"""One row more counts as much as this many prompt tokens that must be computed."""
ADAPTER_TOKENS = 2 * ROW_TOKENS
"""An adapter that must be copied to a worker's device counts as much as this many prompt tokens."""
MAX_COMPARED = 8
"""Workers that are compared for one request: of equally many rows, and of those that know its beginning."""
WORTH_WAITING = 32
"""Least tokens for which a request waits until a row has computed them."""
REFUSAL_CHANGES = 64
"""Changes of workers after which the `refusal` is forgotten."""


def find_known(replica: Replica, sequence: Sequence, waits: bool) -> tuple[int, PlacedRow | None]:
    """Return how many tokens of a request a worker has computed, and None. If the request `waits` for tokens
    that rows compute, and they are enough: also count these, and return the row that computes the last one.
    """
    here, end, row = replica.pool.cache.find_expected(replica.names(sequence))
    if waits and (end - here) * replica.block_size >= WORTH_WAITING:
        return end * replica.block_size, row
    return here * replica.block_size, None


def is_as_large(tokens: tuple[float, float], others: tuple[float, float]) -> bool:
    """Whether a request needs at least as many tokens as another at the shortest and the longest horizon, and
    so at all horizons between them.
    """
    return tokens[0] >= others[0] and tokens[1] >= others[1]


class Placement:
    """The workers that may be given rows.

    Attributes:
        levels: number of rows → the workers that have that number.
        with_batch: workers with rows of the class `batch`; the one that changed last is at the end.
        changes: worker → number of its last change, the newest at the end.
        refusal: tokens, at the shortest and the longest horizon, that no worker had room for, and the number
            of the last change before. A beam search leaves none: it needs more places than others. Nor does a
            request with an adapter or with pictures, which some workers may not serve.
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

    def holds(self, adapter: str) -> bool:
        """Whether one of them has loaded an adapter."""
        return any(adapter in replica.adapters for replica in self.rows)

    def choose(self, sequence: Sequence, knowing: list[Replica]) -> tuple[Replica | None, PlacedRow | None]:
        """Return the worker that has most of the request computed, of those `knowing` its beginning, unless
        others have far fewer rows; None if none can start it. Return a row with it if the request should wait
        until that row has computed its prompt. A request with an adapter prefers workers with the adapter on
        their device.

        While another worker can start it, a request goes to none with more rows than MAX_SPREAD allows,
        whatever is cached there. While a worker has no rows, it waits for no row. Choices of one answer are
        the exception: they stay together for the prompt that they share.
        """
        fewest = self.fewest_rows(sequence)
        near = dict.fromkeys([*knowing, *self.on_device(sequence)]) if sequence.request.adapter else knowing
        sharing = [replica for replica in near if replica.can_start(sequence)]
        if not sharing:
            return fewest, None
        num_siblings = sequence.request.num_choices - 1
        waits = num_siblings > 0 or fewest is None or fewest.num_due > 0
        most = math.ceil(MAX_SPREAD * (self.num_rows + 1) / len(self.rows)) + num_siblings
        weight = 0 if num_siblings else ROW_TOKENS

        def cost(replica: Replica) -> tuple[int, tuple[int, int]]:
            tokens = weight * replica.num_due - find_known(replica, sequence, waits)[0]
            return tokens + ADAPTER_TOKENS * replica.must_copy(sequence), replica.load

        able = [replica for replica in sharing if replica.num_due < most]
        best = min([*able, fewest] if fewest else able or sharing, key=cost)
        return best, find_known(best, sequence, waits)[1]

    def on_device(self, sequence: Sequence) -> Iterator[Replica]:
        """Yield some workers that have the adapter of a request on their device."""
        return islice((replica for replica in self.rows if not replica.must_copy(sequence)), MAX_COMPARED)

    def fewest_rows(self, sequence: Sequence) -> Replica | None:
        """Return a worker that can start a request, with the fewest rows, and of MAX_COMPARED workers with so
        many rows the one with the most free blocks. After a refusal only workers that have changed are tried.
        """
        longest = self.limits.max_horizon
        tokens = sequence.kv_ahead(min(LEAST_HORIZON, longest)), sequence.kv_ahead(longest)
        refused_at = self.refused_at(sequence, tokens)
        found = self.first_changed(sequence, refused_at) if refused_at else self.first_able(sequence)
        if found is None:
            self.note_refusal(sequence, tokens)
        return found

    def refused_at(self, sequence: Sequence, tokens: tuple[float, float]) -> int:
        """Return the number of the change at which no worker had room for a request, or for a smaller one; 0
        if that is not known. A suspect is always tried again: it waits for more than room.
        """
        if sequence.crash_count:
            return 0
        if not sequence.refused_at and is_as_large(tokens, self.refusal[0]):
            return self.refusal[1]
        return sequence.refused_at

    def note_refusal(self, sequence: Sequence, tokens: tuple[float, float]) -> None:
        """Note that no worker has room for a request, nor for larger ones."""
        sequence.refused_at = self.num_changes
        is_smaller = is_as_large(self.refusal[0], tokens)
        is_old = self.num_changes - self.refusal[1] > REFUSAL_CHANGES
        is_plain = sequence.num_places == 1 and not (sequence.request.adapter or sequence.request.pictures)
        if (is_smaller or is_old) and not sequence.crash_count and is_plain:
            self.refusal = tokens, self.num_changes

    def first_changed(self, sequence: Sequence, after: int) -> Replica | None:
        """Return the least loaded worker that can start a request, of those changed after a change."""
        most = self.limits.max_batch_size - sequence.num_places
        changed = (replica for replica in self.changed(after) if replica.num_due <= most)  # most are full
        by_load = sorted(changed, key=lambda replica: replica.load)
        return next((replica for replica in by_load if replica.can_start(sequence)), None)

    def first_able(self, sequence: Sequence) -> Replica | None:
        """Return a worker that can start a request, of the lowest level that has one."""
        for level in self.levels_in_order():
            replicas = iter(self.levels.get(level, ()))
            while compared := sorted(islice(replicas, MAX_COMPARED), key=lambda replica: replica.load):
                if found := next((replica for replica in compared if replica.can_start(sequence)), None):
                    return found
        return None

    def levels_in_order(self) -> Iterator[int]:
        """Yield the levels, lowest first. The lowest nearly always has room; only then are others sorted."""
        lowest = min(self.levels, default=0)
        yield lowest
        yield from sorted(self.levels.keys() - {lowest})

    def changed(self, after: int) -> Iterator[Replica]:
        """Yield the workers that have changed after the change with this number."""
        for replica, number in reversed(self.changes.items()):
            if number <= after:
                return
            yield replica

    def knowing(self, sequence: Sequence) -> list[Replica]:
        """Return some workers that know the beginning of a request; first those that know most of it."""
        known, names = self.index.first, sequence.names(HASHED_TOKENS)
        if not any(name in known for name in names[: self.block_size // HASHED_TOKENS]):
            return []  # nobody knows a block who does not know those before it
        found: dict[Replica, None] = {}
        for name in reversed(names):
            for cache in islice(self.index.holders(name), MAX_COMPARED):
                found[self.replicas[cache]] = None
            if len(found) >= MAX_COMPARED:
                break
        return list(found)


class WorkerSet:
    """The workers of the pool. It walks all of them only when one comes, goes or drains.

    Attributes:
        replicas: by incarnation.
        closing: the whole pool was told to end, so no other worker will come for requests that wait.
        placement: workers that may be given rows.
        changed: workers that have changed since `take_changed`.
        joined: workers that have joined since `take_joined`.
        largest: a worker for each block size and kind of model, the one with the most blocks.
        evacuating: workers that drain while others stay: their rows go to these.
    """

    def __init__(self, limits: WorkerLimits) -> None:
        self.replicas: dict[str, Replica] = {}
        self.closing = False
        self.placement = Placement(limits)
        self.changed: dict[Replica, None] = {}
        self.joined: list[Replica] = []
        self.largest: list[Replica] = []
        self.evacuating: list[Replica] = []

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
        """Give the worker no new rows. Its rows go to others. Without others, clients' rows go on and jobs
        wait.
        """
        replica = self.replicas.get(incarnation)
        if replica is not None and not replica.draining:
            replica.draining = True
            self.review()

    def set_closing(self) -> None:
        self.closing = True
        self.review()

    def review(self) -> None:
        """Decide which workers are given rows, and which give theirs away. The last ones keep the rows of
        clients, not those of jobs.
        """
        replicas = list(self.replicas.values())
        staying = [replica for replica in replicas if not replica.draining]
        for replica in replicas:
            replica.is_last = replica.draining and not staying
            if replica.is_last:
                replica.due_stops.extend(replica.running)
            self.changed[replica] = None
        self.evacuating = [replica for replica in replicas if replica.draining and staying]
        self.placement.set_open(staying or (replicas if self.closing else []))
        by_blocks = sorted(replicas, key=lambda replica: replica.pool.num_blocks)
        kinds = {(replica.block_size, replica.capacity.pooling): replica for replica in by_blocks}
        self.largest = [*kinds.values()]

    def can_ever_hold(self, sequence: Sequence) -> bool:
        """Whether one of them could hold a request if it held no other."""
        return any(replica.can_ever_hold(sequence) for replica in self.largest)

    def note_change(self, replica: Replica) -> None:
        """Note that a worker's rows or blocks have changed, or must change. A removed worker gets no plan."""
        if self.replicas.get(replica.capacity.incarnation) is replica:
            self.changed[replica] = None
            self.placement.update(replica)

    def take_joined(self) -> list[Replica]:
        """Return the workers that have joined, and are still here, once."""
        joined, self.joined = self.joined, []
        return [replica for replica in joined if replica in self.replicas.values()]

    def take_changed(self) -> list[Replica]:
        """Return the workers that have changed, once."""
        changed, self.changed = list(self.changed), {}
        return changed
