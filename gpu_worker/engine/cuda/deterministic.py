"""DETERMINISTIC on CUDA: each token is computed as a row that decodes, and always beside as many others, in
one captured step.

What a product, a norm or attention makes of a row depends on the shapes it is called with, which decide how
sums are split; not on what stands in other rows. So with one shape for everything, a token's bits are the
same in any batch, chunk or resume. XQA splits a row by the number of rows, of heads, and the width of the
table, which are the graph's.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from gpu_worker.engine.batch.inputs import fill_pending_ids, logit_positions, positions_of, token_ids
from gpu_worker.engine.batch.row_slice import RowSlice
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.batch.to_device import to_device
from gpu_worker.engine.cuda.graphs import CudaGraphs

FIXED_TOKENS = 256
"""Of the captured step. Where weights are read from memory, a step of so many takes some twice as long as one
of a single token.
"""


class FixedShapeGraph:
    """One graph of a fixed shape for steps of all kinds; it is used as CudaGraphs are: previous int64 [rows]
    → logits [positions, vocabulary] of the model's dtype.
    """

    def __init__(self, graphs: CudaGraphs) -> None:
        """`graphs` has one graph, the largest."""
        self.graphs = graphs
        self.size = graphs.max_rows

    def can_run(self, slices: Sequence[RowSlice], previous: torch.Tensor | None) -> bool:
        return True

    def run(self, slices: Sequence[RowSlice], previous: torch.Tensor | None) -> torch.Tensor:
        """Launch a step in chunks of the graph's size → logits [positions, vocabulary]. A chunk sees the K
        and V of those before it, and a token those before it in its own chunk: they are written before
        attention reads them.
        """
        graphs, places, logits = self.graphs, logit_positions(slices), [self.graphs.logits[:0]]
        for begin, inputs in chunks_of(slices, self.size):
            graphs.copy_inputs(inputs, self.size)
            graphs.ids.copy_(fill_pending_ids(graphs.ids.long(), previous))
            graphs.graphs[self.size]()
            inside = places[(places >= begin) & (places < begin + self.size)] - begin
            logits.append(graphs.logits.index_select(0, to_device(inside, graphs.device)))
        return torch.cat(logits)


def chunks_of(slices: Sequence[RowSlice], size: int) -> Iterator[tuple[int, Int32]]:
    """The tokens of a step, `size` at a time → the position of the first one in the batch, and the inputs for
    `CudaGraphs.copy_inputs`: int32 [2 + blocks, size].
    """
    ids, positions = token_ids(slices), positions_of(slices)
    rows = np.repeat(np.arange(len(slices)), [row_slice.count for row_slice in slices])
    tables = np.zeros((len(slices), max(len(row_slice.row.blocks) for row_slice in slices)), np.int32)
    for line, row_slice in zip(tables, slices, strict=True):
        line[: len(row_slice.row.blocks)] = row_slice.row.blocks
    for begin in range(0, len(ids), size):
        chunk = slice(begin, begin + size)
        inputs = np.zeros((2 + tables.shape[1], size), np.int32)
        inputs[:, : len(ids[chunk])] = np.vstack((ids[chunk], positions[chunk], tables[rows[chunk]].T))
        yield begin, inputs
