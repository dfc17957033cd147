"""Replica: the batcher's model of one worker: its rows, its blocks, and how far it may run."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from batcher.scheduling.block_pool import BlockPool
from batcher.scheduling.sequence import PlacedRow, Sequence
from batcher.scheduling.step_times import StepTimes
from common.block_hashes import block_names
from common.messages.packing import unpack_ids
from common.messages.plan import HeldRow, Report, WorkerCapacity


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of every worker, besides its own capacity."""

    max_batch_size: int = 256
    horizon: int = 32
    inter_token_target_ms: float | None = None


@dataclass(slots=True, eq=False)
class Replica:
    """One incarnation of a worker.

    Attributes:
        rows: by number; a row stays until the engine releases it.
        num_running: how many of them have not ended.
        reserved: blocks that these may soon need, so that no row starts with them.
        step: the last step it reported.
        until: the last step granted.
        plan, plan_seen: numbers of the last plan made and of the last one that the worker reported.
        acknowledged: sequence of the last report applied.
        leaving: blocks, by number, of rows from before this epoch that do not go on; in use until the engine
            releases the row.
        disowned: those of them that must be stopped.
        starved: a row did not get all the blocks it needs for the steps granted.
        draining: it was told to end.
        evacuates: it drains, and its rows go to other workers.
        times: of its steps.
    """

    capacity: WorkerCapacity
    limits: WorkerLimits
    pool: BlockPool = field(init=False)
    rows: dict[int, PlacedRow] = field(default_factory=dict)
    num_running: int = 0
    reserved: int = 0
    step: int = 0
    until: int = 0
    plan: int = 1
    plan_seen: int = 1
    acknowledged: int = 0
    leaving: dict[int, list[int]] = field(default_factory=dict)
    disowned: list[int] = field(default_factory=list)
    starved: bool = False
    draining: bool = False
    evacuates: bool = False
    next_row: int = 1
    times: StepTimes = field(default_factory=StepTimes)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.capacity.num_blocks)

    @property
    def block_size(self) -> int:
        return self.capacity.block_size

    @property
    def running(self) -> Iterator[PlacedRow]:
        """Rows that have not ended, oldest first."""
        return (row for row in self.rows.values() if not row.ended)

    @property
    def load(self) -> tuple[int, int]:
        return self.num_running, -self.pool.num_free

    @property
    def has_suspect(self) -> bool:
        """Whether a row runs that was there when a worker died and has committed no token since."""
        return any(row.sequence.crash_count and not row.prefilled for row in self.running)

    @property
    def needs_grant(self) -> bool:
        """Whether it is time to grant more steps, or blocks that were missing."""
        return self.num_running > 0 and (
            self.until - self.step <= self.limits.horizon // 2 or (self.starved and self.pool.num_free > 0)
        )

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def first_blocks(self, sequence: Sequence) -> int:
        """Number of blocks that a row starts with: for the tokens it has, for the horizon, and for a block of
        progress, without which it is not preempted.
        """
        ahead = max(self.limits.horizon, self.block_size)
        return self.blocks_for(min(sequence.num_known + ahead, sequence.max_kv))

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether the whole request, to its last token, fits into the empty cache."""
        return self.blocks_for(sequence.max_kv) <= self.pool.num_blocks

    def can_start(self, sequence: Sequence) -> bool:
        """Whether a row may start now.

        What running rows may soon need must be left, or a row would be preempted for the new one. Suspects
        start one at a time, so the next crash tells which of them is to blame.
        """
        if self.starved or self.num_running >= self.limits.max_batch_size:
            return False
        if sequence.crash_count and self.has_suspect:
            return False
        needed = self.first_blocks(sequence) + self.reserved
        if self.pool.can_allocate(needed):
            return True
        cached = self.cached_blocks(sequence)
        return bool(cached) and self.pool.can_allocate(needed - len(cached), cached)

    def names(self, sequence: Sequence) -> list[bytes]:
        """The names of the blocks that a row of this sequence fills as it starts; none if it shares none."""
        return sequence.names(self.block_size) if self.capacity.prefix_caching else []

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks whose KV a row would find here. One token at least is left to compute, for the logits of the
        next one.
        """
        names = self.names(sequence)
        return self.pool.cache.find(names)[: (sequence.num_known - 1) // self.block_size] if names else []

    def start(self, sequence: Sequence) -> PlacedRow:
        cached = self.cached_blocks(sequence)
        self.pool.share(cached)
        blocks = cached + self.pool.allocate(self.first_blocks(sequence) - len(cached))
        row = PlacedRow(self.next_row, sequence, blocks, num_cached=len(cached) * self.block_size)
        self.next_row += 1
        self.add(row)
        sequence.waiting = False
        sequence.attempt += 1
        return row

    def add(self, row: PlacedRow) -> None:
        """A row is here that has not ended."""
        self.rows[row.number] = row
        self.num_running += 1
        row.sequence.row = row
        self.reserve(row)

    def reserve(self, row: PlacedRow) -> None:
        """Reserve blocks for a horizon and a block more of a row, or to its end."""
        left = self.blocks_for(row.sequence.max_kv) - len(row.blocks)
        self.reserved -= row.reserved
        row.reserved = min(left, self.blocks_for(self.limits.horizon) + 1)
        self.reserved += row.reserved

    def leave(self, row: PlacedRow) -> None:
        """A row runs no more."""
        self.num_running -= 1
        self.reserved -= row.reserved
        row.sequence.row = None

    def take_over(self, report: Report, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Let the rows of a worker from before this epoch go on where they are.

        Return those of `sequences` that the worker holds no more. A row of none of them is stopped. The next
        plan grants steps to all. Raises ValueError, and changes nothing, if the report contradicts itself.
        """
        self.pool.reserve(self.count_rows(report.held))
        self.step = self.until = report.step
        self.next_row = report.last_row + 1
        by_name = {sequence.request_id: sequence for sequence in sequences}
        for held in report.held:
            sequence = by_name.get(held.request_id)
            if sequence is not None and sequence.attempt == held.attempt and not held.ended:
                self.adopt(held, by_name.pop(held.request_id))
                continue
            self.leaving[held.row] = unpack_ids(held.blocks)
            if not held.ended:
                self.disowned.append(held.row)
        return list(by_name.values())

    def count_rows(self, held: Iterable[HeldRow]) -> Counter[int]:
        """How many rows have each block.

        Raises ValueError if two rows have a block that was not complete when they started, or if a block is
        at two places.
        """
        count: Counter[int] = Counter()
        own: set[int] = set()
        places: dict[int, int] = {}
        for row in held:
            for place, block in enumerate(unpack_ids(row.blocks)):
                is_own = place >= row.num_cached // self.block_size
                if places.setdefault(block, place) != place or (is_own and block in own):
                    raise ValueError(f"block {block} is in use twice")
                if is_own:
                    own.add(block)
                count[block] += 1
        return count

    def adopt(self, held: HeldRow, sequence: Sequence) -> None:
        row = PlacedRow(
            held.row, sequence, unpack_ids(held.blocks), held.kv_len, held.step, num_cached=held.num_cached
        )
        sequence.base = held.base
        self.add(row)
        if row.prefilled:
            sequence.crash_count = 0
        self.publish(row, max(held.kv_len, held.num_cached), self.names(sequence))

    def publish(self, row: PlacedRow, kv_len: int, names: list[bytes]) -> None:
        """Let other rows start with the blocks that the first `kv_len` tokens of a row fill."""
        for block, name in zip(row.blocks[: kv_len // self.block_size], names, strict=False):
            self.pool.cache.add(name, block)

    def prefilled(self, row: PlacedRow, kv_len: int, step: int) -> None:
        """The row's prompt is computed."""
        row.kv_len = kv_len
        row.at_step = step
        row.sequence.crash_count = 0
        if not row.ended:
            self.publish(row, kv_len, self.names(row.sequence))

    def withdraw(self, row: PlacedRow) -> None:
        """Remove a row whose plan was never published."""
        del self.rows[row.number]
        self.leave(row)
        self.pool.release(row.blocks)

    def end(self, row: PlacedRow) -> None:
        """The row runs no more; its blocks stay in use until the engine releases it."""
        row.ended = True
        self.leave(row)
        self.starved = self.starved and self.num_running > 0

    def release(self, number: int, kv_len: int = 0, hashes: bytes = b"") -> None:
        """The engine released a row, which had computed `kv_len` tokens: its blocks may go to others.

        `hashes` are those of what it generated.
        """
        if (row := self.rows.pop(number, None)) is not None:
            names: list[bytes] = []
            if self.capacity.prefix_caching:
                known = row.sequence.request.block_hashes + hashes  # what is committed may be another run's
                names = block_names(known, self.block_size)[: kv_len // self.block_size]
                self.publish(row, kv_len, names)
            self.pool.release(row.blocks, names)
        self.pool.release(self.leaving.pop(number, []))
