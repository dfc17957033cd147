"""Replica: the batcher's model of one worker: its rows, its blocks, its pace, and how far it may run.

The worker's reports tell its pace: times of steps, ends of rows, and round trips of grants. The horizon of
grants and the tokens of prefill beside decode follow from it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from batcher.scheduling.kv_blocks import BlockPool
from batcher.scheduling.sequence import PREEMPT, PlacedRow, Sequence
from common.messages.plan import Report, WorkerCapacity
from common.messages.request import LEAST_URGENT, block_names
from common.settings.fields import SettingFields

STEP_TIME_MEMORY = 0.98
"""What is left of the sums in `StepTimes` after one step."""
PACE_MEMORY = 0.99
"""What is left of the figures in `WorkerPace` after one step, or one round trip."""
NEWEST_TRIP = 0.1
"""Share of the newest round trip in their mean."""
LEAST_PREFILL_SHARE = 0.25
"""Least time of prefill in a step, as a share of a decode step's time. Without it prompts would starve where
decode alone misses the target.
"""
LEAST_PREFILL_TOKENS = 16
"""Least prompt tokens of a step that computes any: fewer take nearly as long."""
LAUNCHED_STEPS = 2
"""A grant takes effect at a step boundary, and a step is launched before the one before it is read."""
LEAST_HORIZON = 32
"""Steps granted even where a grant comes at once, so that reports and plans are seldom due."""
CACHE_PARTS = 8
"""More than LEAST_HORIZON is granted only while the slots for it, of all rows, are one part in CACHE_PARTS of
the cache.
"""


@dataclass(slots=True)
class StepTimes:
    """Sums over the last steps; earlier steps count less and less.

    They are sums because the time that a few tokens add to one step is less than its noise.

    Attributes:
        decode_steps, decode_ms: steps that computed no prompt, and their time.
        tokens, added_ms: prompt tokens, and the time that they added to their steps.
    """

    decode_steps: float = 0.0
    decode_ms: float = 0.0
    tokens: float = 0.0
    added_ms: float = 0.0

    def add(self, step_times: Iterable[tuple[int, int, int, float]]) -> None:
        """Learn from a report's `step_times`."""
        for steps, decoding, tokens, ms in step_times:
            if steps < 1 or tokens < 0 or ms <= 0:
                continue
            memory = STEP_TIME_MEMORY**steps
            if tokens:
                self.tokens = memory * self.tokens + tokens
                self.added_ms = memory * self.added_ms + ms - decoding * self.step_ms
            else:
                self.decode_steps = memory * self.decode_steps + steps
                self.decode_ms = memory * self.decode_ms + ms

    @property
    def step_ms(self) -> float:
        """Time of a step without prefill; 0 while it is not known."""
        return self.decode_ms / self.decode_steps if self.decode_steps else 0.0

    def prefill_tokens(self, target_ms: float, most: int) -> int:
        """Return how many prompt tokens, at most `most`, a step in which rows decode may compute.

        Args:
            target_ms: how long the step may take; 0 sets no bound.
        """
        step_ms = self.step_ms
        if target_ms == 0 or not step_ms or self.added_ms <= 0:
            return most
        return min(most, max(self.least_tokens, self.tokens_in(target_ms - step_ms)))

    @property
    def least_tokens(self) -> int:
        """Least prompt tokens of a step that computes any."""
        return max(LEAST_PREFILL_TOKENS, self.tokens_in(LEAST_PREFILL_SHARE * self.step_ms))

    def tokens_in(self, ms: float) -> int:
        """Return how many prompt tokens are computed in `ms`; 0 while it is not known."""
        return int(ms * self.tokens / self.added_ms) if self.added_ms > 0 else 0


@dataclass(slots=True)
class WorkerPace:
    """How fast one worker goes.

    A grant's round trip begins at the step at which a report is due, and ends when the engine has the grant.

    Attributes:
        trip_ms: mean round trip.
        late_trip_ms: a round trip that few exceed: the longest one, which fades with each later one.
        late_trip_steps: the same in steps without prefill; 0 while it is not known.
        steps, ended: sums over the last steps: their number, and the rows that ended in them.
    """

    times: StepTimes = field(default_factory=StepTimes)
    trip_ms: float = 0.0
    late_trip_ms: float = 0.0
    late_trip_steps: int = 0
    steps: float = 0.0
    ended: float = 0.0

    def add(self, report: Report, num_steps: int) -> None:
        """Learn from a report that comes `num_steps` after the last one."""
        self.times.add(report.step_times)
        for ms in report.round_trips:
            if 0 < ms < math.inf:
                self.trip_ms += (ms - self.trip_ms) * (NEWEST_TRIP if self.trip_ms else 1)
                self.late_trip_ms = max(ms, PACE_MEMORY * self.late_trip_ms)
        self.late_trip_steps = math.ceil(self.steps_in(self.late_trip_ms))
        memory = PACE_MEMORY**num_steps
        self.steps = memory * self.steps + num_steps
        self.ended = memory * self.ended + len(report.ended)

    def steps_in(self, ms: float) -> float:
        """Return how many steps without prefill take `ms`; 0 while it is not known."""
        step_ms = self.times.step_ms
        return ms / step_ms if step_ms else 0.0

    @property
    def ends_per_trip(self) -> float:
        """Mean number of rows that end before the batcher's answer to an end arrives."""
        per_step = self.ended / self.steps if self.steps else 0.0
        return per_step * (self.steps_in(self.trip_ms) + LAUNCHED_STEPS)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of every worker, besides its own capacity."""

    max_batch_size: int = 256
    max_horizon: int = 256
    inter_token_target_ms: float = 0
    waiting_served_ratio: float | None = None
    max_waiting_tokens: int | None = None

    @classmethod
    def read(cls, settings: SettingFields) -> "WorkerLimits":
        return cls(
            settings.max_batch_size,
            settings.horizon,
            settings.inter_token_latency_target_ms,
            settings.waiting_served_ratio,
            settings.max_waiting_tokens,
        )


@dataclass(slots=True, eq=False)
class Replica:
    """One incarnation of a worker.

    Attributes:
        rows: by number; a row stays until the engine releases it.
        num_running: places of the rows that have not ended; a row has one, a beam search one for each beam.
        batch_rows: running rows of the least urgent class.
        interrupted: running rows whose answer had begun when they started, until their prompt is computed.
        reserved: blocks that running rows may soon need, so that no row starts with them.
        num_followers: places of requests that wait until one of its rows has computed what they share.
        step: the last step it reported.
        until, report_at: the last step granted, and the one at which the next grant is due.
        plan, plan_written, plan_seen: numbers of the last plan made, written, and reported by the worker.
        acknowledged: sequence of the last report applied.
        leaving: row → blocks of inherited rows that were not adopted; held until the engine releases them.
        disowned: rows in `leaving` that must be stopped.
        due_stops: rows that the next plan may have to stop.
        is_short: a row may fill its blocks before the steps granted are over.
        starved: a row did not get all the blocks it needs for the steps granted.
        whole_steps_for, joins: why prompts took whole steps by the last plan, and why prompts joined with it
            rows that decode; empty if they did not.
        draining: it was told to end.
        is_last: it drains, and no worker stays that could have its rows.
        adapters: keys of the LoRA adapters that it has loaded.
        recent: those whose rows started last, the newest at the end: they are on its device, as far as can be
            told.
    """

    capacity: WorkerCapacity
    limits: WorkerLimits
    pool: BlockPool = field(init=False)
    block_size: int = field(init=False)
    rows: dict[int, PlacedRow] = field(default_factory=dict)
    num_running: int = 0
    batch_rows: dict[PlacedRow, None] = field(default_factory=dict)
    interrupted: dict[PlacedRow, None] = field(default_factory=dict)
    reserved: int = 0
    num_followers: int = 0
    step: int = 0
    until: int = 0
    report_at: int = 0
    plan: int = 1
    plan_written: int = 1
    plan_seen: int = 1
    acknowledged: int = 0
    leaving: dict[int, list[int]] = field(default_factory=dict)
    disowned: list[int] = field(default_factory=list)
    due_stops: list[PlacedRow] = field(default_factory=list)
    is_short: bool = False
    starved: bool = False
    whole_steps_for: str = ""
    joins: str = ""
    draining: bool = False
    is_last: bool = False
    next_row: int = 1
    pace: WorkerPace = field(default_factory=WorkerPace)
    adapters: frozenset[str] = frozenset()
    recent: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places = self.capacity.places(self.limits.max_batch_size)
        self.limits = replace(self.limits, max_batch_size=places)
        self.pool = BlockPool(self.capacity.num_blocks)
        if self.capacity.max_rows:  # its model has states
            self.pool.cache.snapshots = set()
        self.block_size = self.capacity.block_size

    @property
    def running(self) -> Iterator[PlacedRow]:
        """Rows that have not ended, oldest first."""
        return (row for row in self.rows.values() if not row.ended)

    def split_rows(self, rows: Iterable[PlacedRow]) -> tuple[list[PlacedRow], list[PlacedRow]]:
        """Return the first of `rows`, as many as have places in the batch, and those that stand by."""
        placed: list[PlacedRow] = []
        left, rows = self.limits.max_batch_size, iter(rows)
        for row in rows:
            left -= row.sequence.num_places
            if left < 0:
                return placed, [row, *rows]
            placed.append(row)
        return placed, []

    @property
    def num_due(self) -> int:
        """Places of rows that run, and of requests that follow one of them."""
        return self.num_running + self.num_followers

    @property
    def load(self) -> tuple[int, int]:
        return self.num_due, -self.pool.num_free

    @property
    def has_suspect(self) -> bool:
        """Whether a suspect's prompt is being computed here."""
        return any(row.sequence.crash_count and not row.is_prefilled for row in self.running)

    @property
    def needs_grant(self) -> bool:
        """Whether it is time to grant more steps, or blocks that were missing."""
        lacks_blocks = self.is_short or (self.starved and self.pool.num_free > 0)
        return self.num_running > 0 and (lacks_blocks or self.step >= self.report_at)

    @property
    def debts(self) -> dict[str, int]:
        """What it owes (`batcher/worker_registry.py`), with what was last heard of it."""
        if not (self.rows or self.leaving):
            return {}
        unseen = {"plans": self.plan_seen} if self.plan_seen < self.plan_written else {}
        return {"reports": self.acknowledged} | unseen

    @property
    def horizon(self) -> int:
        """How many steps it is granted ahead. A report asks for the next grant when half of them are left,
        and it comes within a late round trip.
        """
        slots_per_row = self.pool.num_blocks * self.block_size // max(1, self.num_running)
        needed = 2 * (self.pace.late_trip_steps + LAUNCHED_STEPS)
        return min(self.limits.max_horizon, max(LEAST_HORIZON, min(needed, slots_per_row // CACHE_PARTS)))

    def can_ever_hold(self, sequence: Sequence) -> bool:
        """Whether a row of this sequence fits if there is no other."""
        needed = sequence.blocks_for(sequence.max_kv, self.block_size)
        return (
            self.computes(sequence)
            and needed <= self.pool.num_blocks
            and sequence.num_places <= self.limits.max_batch_size
        )

    def computes(self, sequence: Sequence) -> bool:
        """Whether the worker's model makes what a request asks for: a vector or tokens."""
        return bool(self.capacity.pooling) == (sequence.request.pooling is not None)

    def first_blocks(self, sequence: Sequence) -> int:
        """Number of blocks to start with: for the steps granted, and the progress before a preemption."""
        ahead = max(self.horizon, self.until - self.step, self.block_size)
        return sequence.blocks_for(sequence.kv_ahead(ahead), self.block_size)

    def can_start(self, sequence: Sequence) -> bool:
        """Whether a row may start now. Suspects start one at a time, so that a crash tells which one is to
        blame.
        """
        is_full = self.num_due + sequence.num_places > self.limits.max_batch_size
        if is_full or (sequence.crash_count and self.has_suspect) or not self.computes(sequence):
            return False
        return self.has_room(sequence)

    def can_serve(self, sequence: Sequence) -> bool:
        """Whether it computes pictures, if a request has some, and has the adapter that the request names."""
        request = sequence.request
        has_adapter = not request.adapter or request.adapter in self.adapters
        return has_adapter and (self.capacity.pictures or not request.pictures)

    def must_copy(self, sequence: Sequence) -> bool:
        """Whether the adapter that a request names is not on its device."""
        return bool(adapter := sequence.request.adapter) and adapter not in self.recent

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a row can be computed here, and start with blocks that no running row may soon need."""
        if self.starved or not self.can_serve(sequence):
            return False
        needed = self.first_blocks(sequence) + self.reserved
        if self.pool.can_allocate(needed):
            return True
        cached = self.cached_blocks(sequence)
        return bool(cached) and self.pool.can_allocate(needed - len(cached), cached)

    def names(self, sequence: Sequence) -> list[bytes]:
        """Names of the blocks that a row of this sequence fills as it starts; none if it shares none. States
        are kept at the end of the last block after which a token is left to compute.
        """
        names = sequence.names(self.block_size) if self.capacity.prefix_caching else []
        return names[: self.most_cached(sequence)] if self.pool.cache.snapshots is not None else names

    def most_cached(self, sequence: Sequence) -> int:
        """Blocks that a row can find computed: one token at least is left to compute, for logits."""
        return (sequence.num_known - 1) // self.block_size

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks whose KV a row would find here."""
        names = self.names(sequence)
        return self.pool.cache.find(names[: self.most_cached(sequence)]) if names else []

    def start(self, sequence: Sequence) -> PlacedRow:
        cached = self.cached_blocks(sequence)
        self.pool.share(cached)
        blocks = cached + self.pool.allocate(self.first_blocks(sequence) - len(cached))
        num_cached, worker = len(cached) * self.block_size, self.capacity.incarnation
        row = PlacedRow(self.next_row, sequence, blocks, num_cached=num_cached, worker=worker)
        self.pool.cache.expect(self.names(sequence)[len(cached) :], row)
        self.next_row += 1
        self.add(row)
        self.reserve(row, self.horizon)
        sequence.waiting = False
        sequence.attempt += 1
        return row

    def add(self, row: PlacedRow) -> None:
        """Add a row that has not ended; the caller reserves blocks for it."""
        self.rows[row.number] = row
        row.added_at = self.step
        self.num_running += row.sequence.num_places
        if adapter := row.sequence.request.adapter:
            self.note_adapter(adapter)
        if row.sequence.class_index == LEAST_URGENT:
            self.batch_rows[row] = None
        if row.was_interrupted:
            self.interrupted[row] = None
        row.sequence.row = row

    def note_adapter(self, adapter: str) -> None:
        """Note that a row has this adapter, which may take the place of another one on the device."""
        self.recent.pop(adapter, None)
        self.recent[adapter] = None
        if len(self.recent) > self.capacity.max_loras:
            del self.recent[next(iter(self.recent))]

    def reserve(self, row: PlacedRow, horizon: int) -> None:
        """Reserve blocks for a horizon of a row and one block more, or for all that it can fill."""
        sequence = row.sequence
        left = sequence.blocks_for(sequence.max_kv, self.block_size) - len(row.blocks)
        self.reserved -= row.reserved
        row.reserved = min(left, sequence.num_places * (-(-horizon // self.block_size) + 1))
        self.reserved += row.reserved

    def detach_row(self, row: PlacedRow) -> None:
        """Take a row out of the running ones."""
        self.num_running -= row.sequence.num_places
        self.batch_rows.pop(row, None)
        self.interrupted.pop(row, None)
        self.reserved -= row.reserved
        if not row.is_prefilled:
            self.pool.cache.expect_no_more(self.names(row.sequence), row)
        row.sequence.row = None

    def preempt(self, row: PlacedRow) -> None:
        """Have the next plan stop a row, whose request goes on elsewhere or later."""
        row.stopping = PREEMPT
        self.due_stops.append(row)

    def wait_for_prefill(self, row: PlacedRow, sequence: Sequence) -> None:
        """Have a request wait until a row has computed its prompt, or will not."""
        row.followers.append(sequence)
        sequence.follows = row
        self.num_followers += sequence.num_places

    def take_followers(self, row: PlacedRow) -> list[Sequence]:
        """Return the requests that have waited for a row, and need not any more."""
        self.num_followers -= sum(one.num_places for one in row.followers)
        followers = [one for one in row.followers if one.waiting and one.follows is row]
        row.followers = []
        return followers

    def cache_blocks(self, row: PlacedRow, kv_len: int, names: list[bytes]) -> None:
        """Let other rows start with the blocks that the first `kv_len` tokens of a row fill."""
        for block, name in zip(row.blocks[: kv_len // self.block_size], names, strict=False):
            self.pool.cache.add(name, block)

    def on_prefilled(self, row: PlacedRow, kv_len: int, step: int) -> None:
        """Note that a row's prompt is computed."""
        row.kv_len = kv_len
        row.at_step = step
        row.sequence.crash_count = 0
        self.interrupted.pop(row, None)
        if not row.ended:
            self.cache_blocks(row, kv_len, self.names(row.sequence))
            self.pool.cache.expect_no_more(self.names(row.sequence), row)

    def withdraw(self, row: PlacedRow) -> None:
        """Remove a row whose plan was never published."""
        del self.rows[row.number]
        self.detach_row(row)
        self.pool.release(row.blocks)

    def end_row(self, row: PlacedRow) -> None:
        """End a row; its blocks stay in use until the engine releases it."""
        row.ended = True
        self.detach_row(row)
        self.starved = self.starved and self.num_running > 0

    def release(self, number: int, kv_len: int = 0, hashes: bytes = b"") -> None:
        """Free the blocks of a row that the engine has released.

        Args:
            kv_len: tokens that it had computed.
            hashes: of the tokens that it generated.
        """
        if (row := self.rows.pop(number, None)) is not None:
            names: list[bytes] = []
            if self.capacity.prefix_caching:
                known = row.sequence.request.block_hashes + hashes  # what is committed may be another run's
                names = block_names(known, self.block_size)[: kv_len // self.block_size]
                self.cache_blocks(row, kv_len, names)
            self.pool.release(row.blocks, names)
        self.pool.release(self.leaving.pop(number, []))
