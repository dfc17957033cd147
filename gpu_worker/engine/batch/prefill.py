"""Prefill: which prompts a step computes, and in which order. No tensors."""

from collections.abc import Iterable, Iterator, Sequence

from gpu_worker.engine.batch.prefill_budget import StepBudget
from gpu_worker.engine.batch.row import Row, RowSlice

PATIENCE = 16
"""One step in this number begins with the prompt that has waited longest, unless it was first since then."""


def line_up(prompts: Iterable[Row], step: int) -> list[Row]:
    """Return prompts in the order in which a step computes them: by class, then the one with the fewest
    tokens left, then the one that started first. In one of PATIENCE steps the one that has waited longest
    comes first, so that short prompts do not starve a long one.
    """
    line = sorted(prompts, key=lambda row: (row.class_index, len(row.ids) - row.kv_len))
    last = max(line, key=lambda row: row.num_passed, default=None)
    if last and step % PATIENCE == 0 and last.num_passed >= PATIENCE - 1:
        line.remove(last)
        line.insert(0, last)
    for place, row in enumerate(line):
        row.num_passed = row.num_passed + 1 if place else 0
    return line


def chunks(
    line: Sequence[Row],
    block_size: int,
    budget: StepBudget,
    scores_left: int,
    has_snapshots: bool = False,
) -> Iterator[RowSlice]:
    """Yield chunks of as many tokens as the budget has, at most `scores_left` of them scored. With
    `has_snapshots` one ends at the last end of a block in a prompt.
    """
    for row in line:
        begin = row.kv_len
        unscored = max(0, row.scored_from - begin)
        prefill = len(row.ids) - begin
        computable = num_computable(row, block_size)
        count = min(computable, budget.left(row.class_index), unscored + scores_left)
        if row.pictures and count > 0:
            count = row.pictures.chunk_end(begin, begin + count, begin + computable) - begin
        if has_snapshots and begin < (end := last_block_end(row, block_size)):
            count = min(count, end - begin)
        if count > 0:
            samples = count == prefill and not row.pooling
            yield RowSlice(row, begin, count, samples, num_scored=max(0, count - samples - unscored))
            budget.spend(row.class_index, count)
            scores_left -= max(0, count - unscored)


def last_block_end(row: Row, block_size: int) -> int:
    """The last end of a block in a row's prompt after which a token is left to compute."""
    return (len(row.ids) - 1) // block_size * block_size


def whole_prompts(line: Sequence[Row], block_size: int, budget: StepBudget) -> Iterator[RowSlice]:
    """Yield whole prompts of as many tokens as the budget has; the first may have more."""
    is_first = True
    for row in line:
        count = len(row.ids)
        if num_computable(row, block_size) == count and (is_first or count <= budget.left(row.class_index)):
            yield RowSlice(row, 0, count, samples=False, num_scored=max(0, count - row.scored_from))
            budget.spend(row.class_index, count)
            is_first = False


def num_computable(row: Row, block_size: int) -> int:
    """Return how many tokens of a row's prompt are left and have blocks, and embeddings."""
    end = min(len(row.blocks) * block_size, len(row.ids))
    return (row.pictures.embedded_until(row.kv_len, end) if row.pictures else end) - row.kv_len
