"""Slots of states: a row gets as many as it has places, and keeps them until it is released."""

import numpy as np

from common.messages.request import BeamParams
from gpu_worker.engine.batch.row import Row
from gpu_worker.engine.batch.state_slots import Snapshots, StateSlots


def row(number: int, width: int = 0) -> Row:
    ids = np.zeros(4, np.int32)
    return Row(number, ids, 0, 9, ids, beams=BeamParams(width) if width else None)


def test_rows_wait_until_enough_slots_are_free() -> None:
    slots = StateSlots(3)
    plain, search, later = row(1), row(2, width=2), row(3)
    assert slots.take(plain) and slots.take(search) and slots.take(plain)
    assert (plain.slot, search.slots) == (1, [2, 3])
    assert not slots.take(later) and later.slot == 0
    slots.give_back(plain)
    assert not slots.take(row(4, width=2))
    assert slots.take(later) and later.slot == 1


def test_the_least_recently_used_snapshot_makes_room() -> None:
    snapshots = Snapshots([12, 11])
    for block in (5, 6):
        snapshots.put(block, snapshots.take())
    assert snapshots.find(5) == 11 and snapshots.find(7) == 0
    snapshots.put(8, snapshots.take())
    assert (snapshots.find(5), snapshots.find(6), snapshots.find(8)) == (11, 0, 12)
    assert snapshots.take_changes() == [5, 6, -6, 8] and snapshots.take_changes() == []


def test_a_block_that_gets_other_tokens_frees_its_snapshot() -> None:
    snapshots = Snapshots([1])
    snapshots.put(5, snapshots.take())
    assert snapshots.take() == 1  # of block 5, which lost it
    snapshots.put(6, 1)
    snapshots.forget([5, 6])
    assert snapshots.free == [1] and not snapshots.slots


def test_no_snapshot_is_taken_from_a_row() -> None:
    snapshots = Snapshots([1])
    assert (snapshots.take(), snapshots.take()) == (1, 0)
