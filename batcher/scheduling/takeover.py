"""Takeover: the rows of a worker from before this epoch go on where they are."""

from collections import Counter
from collections.abc import Iterable

from batcher.scheduling.replica import Replica
from batcher.scheduling.sequence import PlacedRow, Sequence
from common.messages.packing import unpack_ids
from common.messages.plan import HeldRow, Report


def take_over(replica: Replica, report: Report, sequences: Iterable[Sequence]) -> list[Sequence]:
    """Have a worker's rows go on. Return those of `sequences` that it holds no more.

    A row of none of them is stopped. The next plan grants steps to all. Raises ValueError, and changes
    nothing, if the report contradicts itself.
    """
    replica.pool.reserve(count_rows(report.held, replica.block_size))
    replica.step = replica.until = report.step
    replica.next_row = report.last_row + 1
    by_name = {sequence.request_id: sequence for sequence in sequences}
    for held in report.held:
        sequence = by_name.get(held.request_id)
        if sequence is not None and sequence.attempt == held.attempt and not held.ended:
            adopt(replica, held, by_name.pop(held.request_id))
            continue
        replica.leaving[held.row] = unpack_ids(held.blocks)
        if not held.ended:
            replica.disowned.append(held.row)
    return list(by_name.values())


def count_rows(held: Iterable[HeldRow], block_size: int) -> Counter[int]:
    """How many rows have each block.

    Raises ValueError if two rows have a block that was not complete when they started, or if a block is at
    two places.
    """
    count: Counter[int] = Counter()
    own: set[int] = set()
    places: dict[int, int] = {}
    for row in held:
        for place, block in enumerate(unpack_ids(row.blocks)):
            is_own = place >= row.num_cached // block_size
            if places.setdefault(block, place) != place or (is_own and block in own):
                raise ValueError(f"block {block} is in use twice")
            if is_own:
                own.add(block)
            count[block] += 1
    return count


def adopt(replica: Replica, held: HeldRow, sequence: Sequence) -> None:
    row = PlacedRow(
        held.row,
        sequence,
        unpack_ids(held.blocks),
        held.kv_len,
        held.step,
        num_cached=held.num_cached,
        worker=replica.capacity.incarnation,
    )
    sequence.base = held.base
    replica.add(row)
    replica.due_stops.append(row)
    if row.prefilled:
        sequence.crash_count = 0
    replica.publish(row, max(held.kv_len, held.num_cached), replica.names(sequence))
