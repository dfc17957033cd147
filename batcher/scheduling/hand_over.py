"""Hand-over: rows of workers that drain go to others, a few at a time; rows that a worker holds from before
this epoch go on where they are.

A row decodes where it is until another worker can compute its tokens at once, so it stands still for one
short prefill. If all rows left together, each would wait for the prefills of the others, or for a place.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

from batcher.scheduling.placement import WorkerSet
from batcher.scheduling.replica import Replica
from batcher.scheduling.sequence import PlacedRow, Sequence
from common.messages.plan import HeldRow, Report
from common.messages.records import unpack_ids


def adopt_rows(replica: Replica, report: Report, sequences: Iterable[Sequence]) -> list[Sequence]:
    """Adopt the rows of a worker. Return the `sequences` that it holds no more.

    Rows of other requests are stopped. Raises ValueError, and changes nothing, if the report contradicts
    itself.
    """
    blocks = [unpack_ids(held.blocks) for held in report.held]
    num_shared = [held.num_cached // replica.block_size for held in report.held]
    replica.pool.reserve(count_rows(blocks, num_shared))
    replica.step = replica.until = report.step
    replica.next_row = report.last_row + 1
    by_name = {sequence.request_id: sequence for sequence in sequences}
    for held, numbers in zip(report.held, blocks, strict=True):
        sequence = by_name.get(held.request_id)
        if sequence is not None and sequence.attempt == held.attempt and not held.ended:
            adopt_row(replica, held, numbers, by_name.pop(held.request_id))
            continue
        replica.leaving[held.row] = numbers
        if not held.ended:
            replica.disowned.append(held.row)
    horizon = replica.horizon
    for row in replica.running:
        replica.reserve(row, horizon)
    return list(by_name.values())


def count_rows(blocks: list[list[int]], num_shared: list[int]) -> Counter[int]:
    """Return how many rows have each block.

    The first `num_shared` blocks of a row were complete when it started. Raises ValueError if two rows have a
    block that was not, or if a block has two places. No loop walks blocks that one row has alone: a large
    pool has a million of them.
    """
    owned = [*chain.from_iterable(row[shared:] for row, shared in zip(blocks, num_shared, strict=True))]
    if len({*owned}) < len(owned):
        raise ValueError(f"block {Counter(owned).most_common(1)[0][0]} is in use twice")
    complete = {*chain.from_iterable(row[:shared] for row, shared in zip(blocks, num_shared, strict=True))}
    places: dict[int, int] = {}
    for row in blocks if complete else ():
        for place, block in enumerate(row):
            if block in complete and places.setdefault(block, place) != place:
                raise ValueError(f"block {block} is in use twice")
    return Counter(chain.from_iterable(blocks))


def adopt_row(replica: Replica, held: HeldRow, blocks: list[int], sequence: Sequence) -> None:
    row = PlacedRow(
        held.row,
        sequence,
        blocks,
        held.kv_len,
        held.step,
        num_cached=held.num_cached,
        worker=replica.capacity.incarnation,
    )
    sequence.base = held.base
    replica.add(row)
    replica.due_stops.append(row)
    if row.is_prefilled:
        sequence.crash_count = 0
    replica.cache_blocks(row, max(held.kv_len, held.num_cached), replica.names(sequence))


HAND_OVER_MS = 150.0
"""Time of the prefills that are on their way to one worker: a row stands still for that, and a round trip."""
UNKNOWN_PACE_TOKENS = 512
"""The same in tokens, for a worker that has reported no prefill yet."""
MAX_RECEIVING = 16
"""Workers that receive rows at once: those with the fewest rows."""


@dataclass(slots=True)
class Room:
    """What one worker can receive now.

    Attributes:
        is_idle: no row is on its way to it. The first row may be longer than `tokens`.
    """

    replica: Replica
    tokens: int
    places: int
    blocks: int
    is_idle: bool = True

    @classmethod
    def of(cls, replica: Replica) -> "Room":
        """Return the room that a worker has beside its rows whose answers stand still."""
        room = cls(
            replica,
            tokens=tokens_at_once(replica),
            places=replica.limits.max_batch_size - replica.num_due,
            blocks=0 if replica.starved else replica.pool.num_free - replica.reserved,
        )
        for row in replica.interrupted:
            room.tokens -= row.sequence.num_known - row.num_cached
            room.is_idle = False
        return room

    def has(self, sequence: Sequence, kv_len: int) -> bool:
        """Whether a row with these tokens would be computed at once."""
        if not self.replica.can_serve(sequence):
            return False
        is_next = self.is_idle or kv_len <= self.tokens
        return is_next and sequence.num_places <= self.places and self.needed(sequence, kv_len) <= self.blocks

    def needed(self, sequence: Sequence, kv_len: int) -> int:
        """Return how many blocks a row takes for these tokens and the next steps."""
        ahead = max(self.replica.horizon, self.replica.block_size)
        return sequence.blocks_for(min(kv_len + ahead, sequence.max_kv), self.replica.block_size)

    def take(self, sequence: Sequence, kv_len: int) -> None:
        self.tokens -= kv_len
        self.places -= sequence.num_places
        self.blocks -= self.needed(sequence, kv_len)
        self.is_idle = False


def tokens_at_once(replica: Replica) -> int:
    """Return how many prompt tokens a worker computes in HAND_OVER_MS, as far as it has reported."""
    times = replica.pace.times
    if times.added_ms <= 0:
        return min(replica.capacity.max_batch_prefill_tokens, UNKNOWN_PACE_TOKENS)
    return int(HAND_OVER_MS * times.tokens / times.added_ms)


def find_room(rooms: list[Room], sequence: Sequence, kv_len: int) -> Room | None:
    """Return the room with the most tokens left of those that have room for a row."""
    able = [room for room in rooms if room.has(sequence, kv_len)]
    return max(able, key=lambda room: room.tokens, default=None)


class HandOver:
    """The rows that are on their way from workers that drain.

    Attributes:
        moves: requests that were stopped, until their tokens are computed elsewhere or they have ended: the
            row of each, and the tokens that another worker must compute.
    """

    def __init__(self, workers: WorkerSet) -> None:
        self.workers = workers
        self.moves: dict[Sequence, tuple[PlacedRow, int]] = {}

    def stop_rows(self, live: Mapping[str, Sequence]) -> None:
        """Stop the rows that leave now: those for which another worker has room. `live`: requests by id."""
        self.moves = {
            sequence: (left, kv_len)
            for sequence, (left, kv_len) in self.moves.items()
            if sequence.request_id in live
            and (sequence.row is None or sequence.row is left or not sequence.row.is_prefilled)
        }
        if not (due := self.due()):
            return
        rooms = self.rooms()
        for row, kv_len in due:
            if (room := find_room(rooms, row.sequence, kv_len)) is None:
                if any(one.replica.can_serve(row.sequence) for one in rooms):
                    return
                continue  # nobody else has its adapter
            room.take(row.sequence, kv_len)
            self.moves[row.sequence] = row, kv_len
            self.workers.preempt(self.workers.replicas[row.worker], [row])

    def holds_back(self, sequence: Sequence) -> bool:
        """Whether a new request must wait, since the places that are left are for rows on their way."""
        if sequence.resumed or not self.moves:
            return False
        needed = sum(one.num_places for one in self.unplaced())
        if not needed:
            return False
        needed += sequence.num_places
        for replica in self.workers.placement.rows:
            needed -= max(0, replica.limits.max_batch_size - replica.num_due)
            if needed <= 0:
                return False
        return True

    def unplaced(self) -> Iterator[Sequence]:
        """Yield the requests that were stopped and have no place elsewhere yet."""
        return (one for one, (left, _) in self.moves.items() if one.row in (None, left))

    def due(self) -> list[tuple[PlacedRow, int]]:
        """Return the rows that have to leave, with the tokens that another worker must compute, the shortest
        first. Beam searches are last, since they start anew.
        """
        rows = [
            (row, max(row.sequence.num_known, row.kv_at(replica.step, replica.step)))
            for replica in self.workers.evacuating
            for row in replica.running
            if not row.stopping
        ]
        return sorted(rows, key=lambda due: (due[0].sequence.num_places, due[1]))

    def rooms(self) -> list[Room]:
        """Return what the workers with the fewest rows can receive beside the rows that are on their way."""
        levels = self.workers.placement.levels
        fewest = chain.from_iterable(levels[num_rows] for num_rows in sorted(levels))
        rooms = [Room.of(replica) for replica in islice(fewest, MAX_RECEIVING)]
        for sequence in self.unplaced() if rooms else ():
            _, kv_len = self.moves[sequence]
            room = find_room(rooms, sequence, kv_len) or max(rooms, key=lambda room: room.tokens)
            room.take(sequence, kv_len)
        return rooms
