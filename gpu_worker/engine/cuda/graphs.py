"""CUDA graphs of steps in which all rows decode: the host launches one thing instead of hundreds."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.batch.inputs import decode_ids, fill_pending_ids, positions_of
from gpu_worker.engine.batch.row_slice import RowSlice
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.batch.to_device import to_device

Decode = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""ids int64 [1, rows], positions int32 [rows], table int32 [rows, blocks] → logits [rows, vocabulary]"""
Plan = Callable[[Int32, Int32], None]
"""positions int32 [rows], table int32 [rows, blocks]: what the host decides before a step is replayed."""
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""A function → one that replays what it launched."""


class CaptureError(Exception):
    """A step cannot be captured: it waits for the device."""


def graph_sizes(max_rows: int, max_tokens: int) -> list[int]:
    """Numbers of tokens that are captured; a step runs in the smallest that has room for its rows and their
    proposals. Beyond `max_rows` steps have proposals, so few sizes are enough.
    """
    sizes = {min(size, max_rows) for size in (1, 2, 4, *range(8, max_rows + 8, 8))}
    while max(sizes) < max_tokens:
        sizes.add(min(2 * max(sizes), max_tokens))
    return sorted(sizes)


class CudaGraphs:
    """One graph for each number of rows. They read and write tensors that stay where they are: what a step
    needs is copied there. A proposal is a row of its own here, as in batch/inputs.py.

    Attributes:
        ids: int32 [max_rows]; below 0 the token that the step in flight samples, as in batch/inputs.py.
        positions: int32 [max_rows]
        table: int32 [max_rows, max_blocks]; the rows' blocks.
        previous: int64 [max_rows]; ids that the step in flight samples.
        logits: [max_rows, vocabulary] of the model's dtype.
    """

    def __init__(
        self,
        decode: Decode,
        plan: Plan,
        max_rows: int,
        max_blocks: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.decode = decode
        self.plan = plan
        self.device = device
        self.max_rows = max_rows
        self.ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self.previous = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.logits = torch.zeros(max_rows, vocab_size, dtype=dtype, device=device)
        self.graphs: dict[int, Callable[[], None]] = {}

    def capture(self, capture: Capture, sizes: Sequence[int]) -> None:
        """The largest first: the others find room in its memory."""
        for size in sorted(sizes, reverse=True):
            self.plan(np.zeros(size, np.int32), np.zeros((size, 1), np.int32))
            self.graphs[size] = capture(lambda size=size: self.forward(size))  # type: ignore[misc]
        self.graphs = dict(sorted(self.graphs.items()))

    def forward(self, size: int) -> None:
        ids = fill_pending_ids(self.ids[:size].long(), self.previous)
        self.logits[:size].copy_(self.decode(ids[None], self.positions[:size], self.table[:size]))

    def can_run(self, slices: Sequence[RowSlice], previous: torch.Tensor | None) -> bool:
        """Whether all rows decode, and are no more than the largest graph has. Slices are in the order of the
        batch: rows that decode come first.
        """
        rows = max(num_tokens(slices), 0 if previous is None else len(previous))
        return slices[-1].decodes and rows <= max(self.graphs, default=0)

    def run(self, slices: Sequence[RowSlice], previous: torch.Tensor | None) -> torch.Tensor:
        """Launch a step of rows that decode → logits, which the next step overwrites. `previous`: what the
        step in flight samples.
        """
        rows = num_tokens(slices)
        size = next(size for size in self.graphs if size >= rows)
        self.copy_inputs(inputs_of(slices, size), size)
        if previous is not None:
            self.previous[: len(previous)].copy_(previous)
        self.graphs[size]()
        return self.logits[:rows]

    def copy_inputs(self, inputs: npt.NDArray[Any], size: int) -> None:
        """Plan a step, and copy its inputs to the graphs' tensors, in one transfer: int32 [2 + blocks,
        size] as of `inputs_of`. Rows that only fill the graph write to scratch block 0.
        """
        self.plan(inputs[1], inputs[2:].T)
        staged = to_device(inputs, self.device)
        self.ids[:size].copy_(staged[0])
        self.positions[:size].copy_(staged[1])
        self.table[:size, : len(staged) - 2].copy_(staged[2:].T)


def num_tokens(slices: Sequence[RowSlice]) -> int:
    return sum(row_slice.count for row_slice in slices)


def inputs_of(slices: Sequence[RowSlice], size: int) -> Int32:
    """→ int32 [2 + blocks, size]: ids, positions, and the rows' blocks, a column for each token."""
    inputs = np.zeros((2 + max(len(row_slice.row.blocks) for row_slice in slices), size), np.int32)
    ids = decode_ids(slices)
    inputs[0, : len(ids)] = ids
    inputs[1, : len(ids)] = positions_of(slices)
    begin = 0
    for row_slice in slices:
        blocks = row_slice.row.blocks
        inputs[2 : 2 + len(blocks), begin : begin + row_slice.count] = blocks[:, None]
        begin += row_slice.count
    return inputs


def make_capture(device: torch.device) -> Capture:
    """Return a function that captures, all in one pool of memory. What is captured runs first without
    capturing, so that all kernels are loaded; on one side stream for all captures, as libraries keep memory
    for each stream that they have seen. CaptureError is raised before capturing begins: a capture that fails
    leaves torch's allocator unusable.
    """
    pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            run()
            run_without_sync(run)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side):
            run()
        return graph.replay

    return capture


def run_without_sync(run: Callable[[], None]) -> None:
    """Run it. Raises CaptureError where the host waits for the device in it, as far as torch knows."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CaptureError(next(iter(str(error).splitlines()), type(error).__name__)) from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
