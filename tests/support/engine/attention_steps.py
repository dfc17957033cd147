"""Steps of a batch for tests of attention backends: prompts in chunks, beside rows that decode."""

import numpy as np
import torch

from gpu_worker.engine.batch.row import Row, RowSlice

CPU = torch.device("cpu")

BLOCKS = 99

STEPS = [
    [(0, 0, 41), (1, 0, 1), (2, 0, 33)],
    [(0, 41, 29), (1, 1, 1), (2, 33, 1), (3, 0, 90)],
    [(0, 70, 1), (1, 2, 1), (3, 90, 1)],
]
"""(row, begin, tokens): prompts in chunks, and rows that decode beside them."""


def rows(block_size: int, lengths: tuple[int, ...]) -> list[Row]:
    """With blocks in no order."""
    shuffled = np.random.default_rng(0).permutation(np.arange(1, BLOCKS + 1)).astype(np.int32)
    sizes = [-(-(length + 4) // block_size) for length in lengths]
    parts = np.split(shuffled, np.cumsum(sizes))
    return [
        Row(number, np.zeros(length, np.int32), 0, 9, part)
        for number, (length, part) in enumerate(zip(lengths, parts, strict=False))
    ]


def chunk(row: Row, begin: int, count: int) -> RowSlice:
    return RowSlice(row, begin, count, samples=True)
