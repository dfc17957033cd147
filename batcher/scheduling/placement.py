"""Placement: the workers of the pool, which of them gets a request, which rows give way when blocks run out,
and which wait beside a full batch.

The cost of placing a request grows neither with the number of workers nor with the number of their rows.
Workers are kept by their number of rows, and a request that found no room is tried only on workers that have
changed since.

Rows keep their blocks by the class of their request, then by the request's age; a resumed row is young, and
by its own age it would be the next to go again. A row stays until it has filled a block, so every attempt
brings a request on.

A row that stands by takes the place of a row that ends, at the same step boundary and without a plan. To a
worker, the rows after the first `Plan.max_rows` that have not ended stand by. Like other rows without KV they
are stopped, adopted and resumed.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from itertools import chain, islice, takewhile

from batcher.scheduling.kv_blocks import PrefixCache, PrefixIndex
from batcher.scheduling.replica import LEAST_HORIZON, Replica, WorkerLimits
from batcher.scheduling.sequence import PREEMPT, PlacedRow, Sequence
from common.messages.request import HASHED_TOKENS, LEAST_URGENT

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


@dataclass(eq=False)
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

    limits: WorkerLimits
    index: PrefixIndex = field(default_factory=PrefixIndex)
    replicas: dict[PrefixCache, Replica] = field(default_factory=dict)
    rows: dict[Replica, int] = field(default_factory=dict)
    levels: dict[int, dict[Replica, None]] = field(default_factory=dict)
    num_rows: int = 0
    with_batch: dict[Replica, None] = field(default_factory=dict)
    block_size: int = 1
    changes: OrderedDict[Replica, int] = field(default_factory=OrderedDict)
    num_changes: int = 0
    refusal: tuple[tuple[float, float], int] = ((math.inf, math.inf), 0)

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
        newer = takewhile(lambda change: change[1] > after, reversed(self.changes.items()))
        changed = (replica for replica, _ in newer if replica.num_due <= most)  # most are full
        by_load = sorted(changed, key=lambda replica: replica.load)
        return next((replica for replica in by_load if replica.can_start(sequence)), None)

    def first_able(self, sequence: Sequence) -> Replica | None:
        """Return a worker that can start a request, of the lowest level that has one."""
        for level in sorted(self.levels):
            replicas = iter(self.levels[level])
            while compared := sorted(islice(replicas, MAX_COMPARED), key=lambda replica: replica.load):
                if found := next((replica for replica in compared if replica.can_start(sequence)), None):
                    return found
        return None

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


@dataclass(eq=False)
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

    limits: InitVar[WorkerLimits]
    replicas: dict[str, Replica] = field(default_factory=dict)
    closing: bool = False
    changed: dict[Replica, None] = field(default_factory=dict)
    joined: list[Replica] = field(default_factory=list)
    largest: list[Replica] = field(default_factory=list)
    evacuating: list[Replica] = field(default_factory=list)

    def __post_init__(self, limits: WorkerLimits) -> None:
        self.placement = Placement(limits)

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

    def preempt(self, replica: Replica, rows: Iterable[PlacedRow]) -> None:
        """Have the next plan of a worker stop rows, whose requests go on elsewhere or later."""
        for row in rows:
            replica.preempt(row)
        self.note_change(replica)

    def take_joined(self) -> list[Replica]:
        """Return the workers that have joined, and are still here, once."""
        joined, self.joined = self.joined, []
        return [replica for replica in joined if replica in self.replicas.values()]

    def take_changed(self) -> list[Replica]:
        """Return the workers that have changed, once."""
        changed, self.changed = list(self.changed), {}
        return changed


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
            workers.preempt(replica, rows[-1:])


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
    """Move interrupted answers that wait for their prefill to workers that have joined and have no rows: of
    each worker its share, the longest ones, since the engine computes the others first.

    When a worker dies, its requests start at once on the others, and wait for each other there. Its successor
    joins seconds later, when no request waits for a place any more.
    """
    joined = [replica for replica in workers.take_joined() if not (replica.num_due or replica.draining)]
    if not joined:
        return
    share = len(joined) / len(workers.replicas)
    for replica in workers.replicas.values():
        waiting = [
            row
            for row in replica.running
            if row.was_interrupted and not row.stopping and any(one.can_serve(row.sequence) for one in joined)
        ]
        waiting.sort(key=lambda row: -row.sequence.num_known)
        if rows := waiting[: int(share * len(waiting))]:
            workers.preempt(replica, rows)


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
        if not self.allows_standby:
            return
        full = sorted(level for level in self.placement.levels if level >= num_places)
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
                self.workers.preempt(replica, victims[:count])
                return replica
            if victims and may_wait:
                self.workers.preempt(replica, victims[: max(1, count)])
                sequence.victim = victims[0]
                return None
        return None


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
