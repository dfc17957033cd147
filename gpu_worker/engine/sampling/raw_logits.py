"""Raw logits: copies to the host those that rows return, as the model computed them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gpu_worker.engine.batch.inputs import offsets_of
from gpu_worker.engine.batch.row import RowSlice

MAX_PIECE_BYTES = 2**22
"""Bytes of one piece of a row's logits, at most, unless one position has more."""


@dataclass(frozen=True, slots=True)
class CopiedLogits:
    """Logits of one row on their way to the host: values float [positions, vocabulary] of the dtype that the
    row returns, from position `first` on.
    """

    row: int
    first: int
    values: torch.Tensor

    def pieces(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (row, first position, little-endian values), once the copy is done."""
        row_bytes = self.values.shape[1] * self.values.element_size()
        count = max(1, MAX_PIECE_BYTES // row_bytes)
        for begin in range(0, len(self.values), count):
            values = self.values[begin : begin + count].view(torch.uint8)
            yield self.row, self.first + begin, values.numpy().tobytes()


def copy_logits(logits: torch.Tensor, slices: Sequence[RowSlice]) -> list[CopiedLogits]:
    """logits float [num_logits, vocabulary] of a step → copies for the rows that return some. On CUDA they
    are only queued: before the next step, which may overwrite `logits`.
    """
    if not any(row_slice.row.logits for row_slice in slices):
        return []
    ends = offsets_of(row_slice.num_logits for row_slice in slices).tolist()[1:]
    return [
        copy_slice(logits[:end], row_slice)
        for end, row_slice in zip(ends, slices, strict=True)
        if row_slice.returned_logits
    ]


@torch.inference_mode()
def copy_slice(logits: torch.Tensor, row_slice: RowSlice) -> CopiedLogits:
    """logits float [positions, vocabulary], the last ones of the slice → a copy of those that it returns."""
    assert row_slice.row.logits is not None
    dtype, positions = getattr(torch, row_slice.row.logits[2]), row_slice.returned_logits
    place = len(logits) - row_slice.kv_len
    values = logits[place + positions.start : place + positions.stop].to(dtype)
    copied = values.to("cpu", non_blocking=True, copy=True)
    return CopiedLogits(row_slice.row.number, positions.start, copied)
