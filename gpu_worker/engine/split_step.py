"""Splits a step that does not fit into memory."""

from collections.abc import Sequence

import torch

from gpu_worker.engine.batch.row import RowSlice

CPU_MESSAGES = ("can't allocate memory", "not enough memory")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tells whether torch ran out of memory; its CPU allocator has no exception of its own."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in CPU_MESSAGES)


def split_step(slices: Sequence[RowSlice]) -> list[list[RowSlice]]:
    """Returns the slices of two steps that together do what one would; nothing for a single token."""
    if len(slices) > 1:
        middle = len(slices) // 2
        return [list(slices[:middle]), list(slices[middle:])]
    [row_slice] = slices
    if row_slice.count == 1:
        return []
    first = row_slice.count // 2
    scores = min(first, row_slice.num_scored)
    return [
        [RowSlice(row_slice.row, row_slice.begin, first, False, num_scored=scores)],
        [
            RowSlice(
                row_slice.row,
                row_slice.begin + first,
                row_slice.count - first,
                row_slice.samples,
                num_scored=row_slice.num_scored - scores,
            )
        ],
    ]
