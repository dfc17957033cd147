"""Takeover: rows that a worker holds from before this epoch go on where they are."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

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
