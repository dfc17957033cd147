"""Beam group: the rows and the KV blocks of one beam search. No tensors.

To the batcher a group is one row. It has `leader`'s number, and its blocks are granted to the leader.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from common.messages.records import num_group_blocks
from gpu_worker.engine.batch.beam_search import Beam, BeamSearch
from gpu_worker.engine.batch.beam_text import BeamText
from gpu_worker.engine.batch.row import Row, RowSlice
from gpu_worker.engine.batch.step_result import Int32

BlockCopy = tuple[int, int]
"""(source, target): the KV of the source is to be copied into the target."""
SlotCopy = tuple[int, int]
"""The same of slots of states."""


class BeamBlocks:
    """The blocks of a group behind the full blocks of its prompt. Beams share what they have in common: a
    full block is shared, the last one is copied while it has room.

    `num_group_blocks` blocks always suffice. At most `width` beams have tables, of equal length, so with
    nothing shared they hold that many. `fork` first drops the tables of beams that no child continues. Of
    each beam that is continued the first child takes the table as it is, every other child one more block. So
    at each moment the tables are those of at most `width` children, and the block that a child takes is one
    of its own. Sources of copies are blocks of first children, targets were free: no block is both.

    Attributes:
        free: blocks that no beam has.
        tables: blocks of each beam, in order.
        uses: block → number of tables that have it.
    """

    def __init__(self, table: Sequence[int], free: Sequence[int]) -> None:
        self.tables = [list(table)]
        self.free = list(free)
        self.uses = Counter(table)

    def fork(self, parents: Sequence[int], is_full: bool) -> list[BlockCopy]:
        """Give the next beams the tables of their `parents` → the blocks to copy. `is_full`: the last block
        of each table is full.
        """
        copies: list[BlockCopy] = []
        for parent in set(range(len(self.tables))).difference(parents):
            self.drop(self.tables[parent])
        tables, continued = [], set[int]()
        for parent in parents:
            table = self.tables[parent]
            if parent in continued:
                table = self.share(table) if is_full else self.share(table[:-1])
                if not is_full:
                    copies.append((self.tables[parent][-1], self.append(table)))
            continued.add(parent)
            tables.append(table)
        self.tables = tables
        return copies

    def share(self, table: list[int]) -> list[int]:
        self.uses.update(table)
        return list(table)

    def drop(self, table: list[int]) -> None:
        for block in table:
            self.uses[block] -= 1
            if not self.uses[block]:
                del self.uses[block]
                self.free.append(block)

    def append(self, table: list[int]) -> int:
        """Append a free block to a table → this block."""
        block = self.free.pop()
        table.append(block)
        self.uses[block] = 1
        return block


@dataclass(slots=True, eq=False)
class BeamGroup:
    """One beam search in a batch. The leader computes the prompt, as every row does; then each beam has a row
    of its own.

    Attributes:
        rows: of the beams that the last launched step computed; none before the second token.
        blocks: None before that.
        num_decoded: tokens that the rows have computed together.
        slots: the beams' slots of states, one each, shared out as their last blocks are; None without states.
        slot_copies: slots to copy before the next step.
    """

    leader: Row
    search: BeamSearch
    block_size: int
    rows: list[Row] = field(default_factory=list)
    blocks: BeamBlocks | None = None
    num_decoded: int = 0
    slots: BeamBlocks | None = None
    slot_copies: list[SlotCopy] = field(default_factory=list)

    @classmethod
    def start(cls, row: Row, text: BeamText | None, block_size: int) -> "BeamGroup":
        """The search of a row that starts; `text` follows its stop strings."""
        assert row.beams and not row.base
        beams = [Beam(state=row.sampling_state, text=text)]
        return cls(row, BeamSearch(row.beams, row.max_new_tokens, row.ends, beams), block_size)

    @property
    def num_in_flight(self) -> int:
        """Slices of its rows that are launched and not read."""
        return self.leader.in_flight + sum(row.in_flight for row in self.rows)

    @property
    def num_shared(self) -> int:
        """Full blocks of the prompt."""
        return len(self.leader.ids) // self.block_size

    @property
    def kv_len(self) -> int:
        """Tokens that each beam holds: the newest one is not computed yet."""
        return len(self.leader.ids) + self.search.length - 1

    def add_blocks(self, blocks: Int32) -> None:
        """Take blocks that are granted to the leader."""
        if self.blocks:
            self.blocks.free += blocks.tolist()

    def slices(self) -> tuple[list[RowSlice], list[BlockCopy]]:
        """Return what the next step computes, and the blocks to copy before that; nothing while a step is
        not read, or the blocks granted do not suffice.
        """
        if self.num_in_flight or not self.has_room:
            return [], []
        copies = self.fork()
        self.num_decoded += len(self.rows)
        return [RowSlice(row, row.kv_len, 1, samples=True) for row in self.rows], copies

    @property
    def has_room(self) -> bool:
        """Whether the blocks granted suffice for one more token of all beams."""
        width, num_prompt = self.search.params.width, len(self.leader.ids)
        needed = num_group_blocks(num_prompt, self.kv_len + 1, width, self.block_size)
        return len(self.leader.blocks) >= needed

    def fork(self) -> list[BlockCopy]:
        """Make the rows of the search's beams → the blocks to copy."""
        beams, kv_len = self.search.beams, self.kv_len
        if self.blocks is None:
            first, end = self.num_shared, -(-kv_len // self.block_size)
            table = self.leader.blocks.tolist()
            self.blocks = BeamBlocks(table[first:end], table[end:])
            if self.leader.slots:
                self.slots = BeamBlocks(self.leader.slots[:1], self.leader.slots[1:])
        is_full = kv_len % self.block_size == 0
        parents = [beam.parent for beam in beams]
        copies = self.blocks.fork(parents, is_full)
        if self.slots:
            self.slot_copies = self.slots.fork(parents, is_full=False)
        shared = self.leader.blocks[: self.num_shared]
        while len(self.rows) < len(beams):
            self.rows.append(replace(self.leader))
        del self.rows[len(beams) :]
        for row, beam, table in zip(self.rows, beams, self.blocks.tables, strict=True):
            if is_full:
                self.blocks.append(table)
            row.blocks = np.concatenate((shared, np.array(table, np.int32)))
            row.kv_len = kv_len
            row.last_id = beam.last.token if beam.last else 0
            row.sampling_state = beam.state
        for row, slots in zip(self.rows, self.slots.tables if self.slots else (), strict=False):
            row.slots = slots
        return copies

    def take_slot_copies(self) -> list[SlotCopy]:
        """Return the slots to copy before the next step."""
        copies, self.slot_copies = self.slot_copies, []
        return copies
