"""A worker as the batcher sees it: its rows, its blocks, and how far it may run."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from batcher.block_pool import BlockPool
from batcher.sequence import Row, Sequence
from common.messages.plan import WorkerCapacity


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds every worker, besides the capacity that it announces itself."""

    max_batch_size: int = 256
    horizon: int = 32


@dataclass(slots=True, eq=False)
class Replica:
    """One incarnation of a worker.

    Attributes:
        rows: by number; a row stays until it is released.
        live: how many of them have not ended.
        step: the last step it reported.
        until: the last step granted.
        plan, plan_seen: numbers of the last plan sent and of the last one that the worker reported.
        acknowledged: sequence of the last report taken in.
        starved: a row could not be given all the blocks it needs for the steps granted.
        draining: it starts nothing more and its rows go elsewhere.
    """

    capacity: WorkerCapacity
    limits: Limits
    pool: BlockPool = field(init=False)
    rows: dict[int, Row] = field(default_factory=dict)
    live: int = 0
    step: int = 0
    until: int = 0
    plan: int = 1
    plan_seen: int = 1
    acknowledged: int = 0
    starved: bool = False
    draining: bool = False
    next_row: int = 1

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.capacity.num_blocks)

    @property
    def block_size(self) -> int:
        return self.capacity.block_size

    @property
    def running(self) -> Iterator[Row]:
        """Rows that have not ended, oldest first."""
        return (row for row in self.rows.values() if not row.ended)

    @property
    def load(self) -> tuple[int, int]:
        return self.live, -self.pool.num_free

    @property
    def has_suspect(self) -> bool:
        """Whether a row runs that was there when a worker died and has not committed a token since."""
        return any(row.sequence.crash_count and not row.prefilled for row in self.running)

    @property
    def low(self) -> bool:
        """Whether it is time to grant more steps, or blocks that were missing."""
        return self.live > 0 and (
            self.until - self.step <= self.limits.horizon // 2 or (self.starved and self.pool.num_free > 0)
        )

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def first_blocks(self, sequence: Sequence) -> int:
        """Blocks that a row starts with: what it holds, and the horizon."""
        return self.blocks_for(min(sequence.num_known + self.limits.horizon, sequence.max_kv))

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether the request fits into the cache at all, to its last token."""
        return self.blocks_for(sequence.max_kv) <= self.pool.num_blocks

    def can_start(self, sequence: Sequence) -> bool:
        """Whether a row may start, with a block left over for each row that runs, so that it is not preempted
        at once.
        """
        if (
            self.draining
            or self.starved
            or self.live >= self.limits.max_batch_size
            or (sequence.crash_count and self.has_suspect)
        ):
            return False
        return self.pool.can_take(self.first_blocks(sequence) + self.live)

    def start(self, sequence: Sequence) -> Row:
        row = Row(self.next_row, sequence, self.pool.take(self.first_blocks(sequence)))
        self.next_row += 1
        self.rows[row.number] = row
        self.live += 1
        sequence.row, sequence.waiting = row, False
        sequence.attempt += 1
        return row

    def withdraw(self, row: Row) -> None:
        """Takes back a row that was never handed over."""
        del self.rows[row.number]
        self.live -= 1
        self.pool.put_back(row.blocks)
        row.sequence.row = None

    def end(self, row: Row) -> None:
        row.ended = True
        self.live -= 1
        self.starved = self.starved and self.live > 0
        row.sequence.row = None

    def release(self, row: Row) -> None:
        del self.rows[row.number]
        self.pool.put_back(row.blocks)
