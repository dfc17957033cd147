"""Which rows may be launched next, and how much of them. No tensors."""

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence

from common.messages.plan import Plan
from gpu_worker.engine.batch.beams import BeamGroup
from gpu_worker.engine.batch.encoding import encoding_cost
from gpu_worker.engine.batch.prefill import num_computable
from gpu_worker.engine.batch.prefill_budget import PrefillBudget, StepBudget
from gpu_worker.engine.batch.row import Row
from gpu_worker.engine.batch.row_pictures import PictureState


def runnable(rows: Iterable[Row], max_places: int, block_size: int) -> Iterator[Row]:
    """Yield the rows that a step may compute: those with a place, room and a compiled grammar."""
    places = max_places
    for row in rows:
        if row.ended or row.needs_no_step:
            continue
        if places < row.num_places:
            return
        places -= row.num_places
        if row.is_ready and room(row, block_size) > 0:
            yield row


def room(row: Row, block_size: int) -> int:
    """Tokens for which a row has blocks."""
    return len(row.blocks) * block_size - row.kv_len


def micro_batch_size(rows: Collection[Row], num_micro_batches: int) -> int:
    """How many rows that decode the next launch may have: a share of all, so that the others are left for the
    launches beside it.
    """
    if num_micro_batches == 1:
        return sys.maxsize
    decoding = sum(
        row.kv_len >= len(row.ids) and not row.ended and row.index < row.max_new_tokens for row in rows
    )
    return -(-decoding // num_micro_batches)


def may_join(row: Row, group: BeamGroup | None, step: int) -> bool:
    """Whether a row may be in the next micro-batch. A group waits for its samples by itself."""
    if group is not None:
        return (group.rows or [row])[0].launched_step < step
    return row.launched_step < step and not row.num_unread


def step_budget(
    budget: PrefillBudget, grant: Plan, decoding: Sequence[Row], line: Sequence[Row], block_size: int
) -> StepBudget:
    """What a step may have in which these rows could decode, and the prompts in line be computed."""
    left = [(row.class_index, num_computable(row, block_size) + encoding_cost(row)) for row in line]
    return budget.plan(grant, [row.class_index for row in decoding], left)


def needed_pictures(rows: Iterable[Row]) -> set[PictureState]:
    """The pictures that rows are still to read, or whose shapes they wait for."""
    return {
        placed.picture
        for row in rows
        if row.pictures and not row.ended
        for placed in row.pictures.placed
        if placed.end > row.kv_len or not placed.picture.shape.done()
    }
