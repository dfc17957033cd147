"""State slots: which rows have a slot for their states, in a model that has states, and which blocks have a
snapshot. No tensors.

A snapshot is what the states of a row were at the end of a block: a row that starts with the blocks up to
this one goes on from there. A row leaves one at the last end of a block in its prompt, and, once it is
released, one at the last end that it has reached.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from gpu_worker.engine.batch.beams import Copies
from gpu_worker.engine.batch.prefill import last_block_end
from gpu_worker.engine.batch.row import Row, RowSlice, StepSlices
from gpu_worker.engine.batch.step_result import Int32


class Snapshots:
    """Which blocks have a snapshot at their end. The least recently used one makes room for another.

    Attributes:
        free: slots without a snapshot.
        slots: block → slot, the least recently used first.
        changes: blocks that have one since the last `take_changes`, and negative those that lost theirs.
    """

    def __init__(self, slots: Iterable[int] = ()) -> None:
        self.free = [*slots]
        self.slots = OrderedDict[int, int]()
        self.changes: list[int] = []

    def find(self, block: int) -> int:
        """The slot of a block's snapshot; 0 if it has none."""
        if block in self.slots:
            self.slots.move_to_end(block)
        return self.slots.get(block, 0)

    def take(self) -> int:
        """Return a slot for a new snapshot; 0 if rows have all slots."""
        if not self.free and self.slots:
            block, slot = self.slots.popitem(last=False)
            self.changes.append(-block)
            return slot
        return self.free.pop() if self.free else 0

    def put(self, block: int, slot: int) -> None:
        """Let rows go on from the snapshot in a slot."""
        self.forget([block])
        self.slots[block] = slot
        self.changes.append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget the snapshots of blocks that get other tokens."""
        for block in blocks:
            if slot := self.slots.pop(block, 0):
                self.free.append(slot)

    def take_changes(self) -> list[int]:
        changes, self.changes = self.changes, []
        return changes


class StateSlots(Copies):
    """Gives each row that a step may compute its slots, one for each place, until the engine releases it.
    Slot 0 is scratch. Slots of snapshots follow those of rows.

    Attributes:
        copies: of states, also of snapshots that rows start with.
        reached: number of a row → (block, slot) of the snapshot at the last end of a block that it has
            reached with a generated token.
    """

    def __init__(self, states: Any, block_size: int) -> None:
        """`states`: the model's (states/model_states.py)."""
        super().__init__(states.copy, [])
        self.block_size = block_size
        self.has_snapshots = states.num_snapshots > 0
        self.free = [*range(states.num_slots, 0, -1)]
        self.snapshot_slots = range(states.num_kept, states.num_slots, -1)
        self.sleep()

    def take(self, row: Row) -> bool:
        """Give a row its slots → whether it has them; it waits if too few are free. A row that starts with
        cached blocks goes on from the snapshot at their end; without it the row is computed from its start.
        """
        if row.slots or len(self.free) < row.output.num_places:
            return bool(row.slots)
        row.slots = [self.free.pop() for _ in range(row.output.num_places)]
        if row.kv_len:
            if snapshot := self.snapshots.find(self.block_before(row, row.kv_len)):
                self.copies.append((snapshot, row.slot))
            else:
                row.kv_len = 0
        return True

    def give_back(self, row: Row) -> None:
        self.free += row.slots
        self.copies[:] = [copy for copy in self.copies if copy[1] not in row.slots]
        row.slots = []
        if snapshot := self.reached.pop(row.number, None):
            self.snapshots.put(*snapshot)

    def after(self, rows: Any, slices: StepSlices) -> None:
        """Keep the states that become snapshots once the step is computed."""
        if self.has_snapshots:
            ends = [one for one in slices if one.kv_len % self.block_size == 0]
            ends = [one for one in ends if not (one.decodes and one.row.output.has_branches)]
            if copies := [(one.row.slot, slot) for one in ends if (slot := self.slot_at(one))]:
                self.copy(copies)

    def granted(self, blocks: Sequence[Int32]) -> None:
        self.snapshots.forget(number for one in blocks for number in one.tolist())

    def sleep(self) -> None:
        self.snapshots = Snapshots(self.snapshot_slots)
        self.reached: dict[int, tuple[int, int]] = {}

    def slot_at(self, end: RowSlice) -> int:
        """The slot that takes a row's states at the end of a slice, which is one of a block; 0: none does."""
        row, block = end.row, self.block_before(end.row, end.kv_len)
        if end.decodes:
            _, slot = self.reached.get(row.number) or (0, self.snapshots.take())
            if slot:
                self.reached[row.number] = block, slot
            return slot
        if end.kv_len not in (last_block_end(row, self.block_size), len(row.ids)):
            return 0
        if self.snapshots.find(block):
            return 0
        if slot := self.snapshots.take():
            self.snapshots.put(block, slot)
        return slot

    def block_before(self, row: Row, kv_len: int) -> int:
        """The block that ends with the first `kv_len` tokens of a row."""
        return int(row.blocks[kv_len // self.block_size - 1])
