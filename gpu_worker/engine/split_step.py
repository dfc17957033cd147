"""A step for which memory does not suffice, in halves."""

from collections.abc import Sequence

import torch

from gpu_worker.engine.batch.rows import RowSlice

CPU_MESSAGES = ("can't allocate memory", "not enough memory")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch found no room; its allocator on CPU has no exception of its own."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in CPU_MESSAGES)


def split_step(parts: Sequence[RowSlice]) -> list[list[RowSlice]]:
    """The parts of two steps that together do what one would; nothing where one token is all there is."""
    if len(parts) > 1:
        middle = len(parts) // 2
        return [list(parts[:middle]), list(parts[middle:])]
    [part] = parts
    if part.count == 1:
        return []
    first = part.count // 2
    scores = min(first, part.scores)
    return [
        [RowSlice(part.row, part.begin, first, False, scores=scores)],
        [
            RowSlice(
                part.row, part.begin + first, part.count - first, part.samples, scores=part.scores - scores
            )
        ],
    ]
