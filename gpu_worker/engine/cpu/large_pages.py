"""Memory that every step reads through, in pages as large as the system has them.

The processor looks up fewer of them, and reads ahead within one. Measured on two cores with 270 MB and with
1.1 GB of bfloat16 weights: the products of a step take a sixth to a quarter less time at one row, a sixth at
8 rows, a twentieth at 32.
"""

import contextlib
import mmap

import torch

REGION_BYTES = 2**26
ALIGNED_BYTES = 64


class LargePages:
    """Allocates tensors next to each other. They keep the memory alive."""

    def __init__(self) -> None:
        self.free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros [count] of `dtype`."""
        num_bytes = count * dtype.itemsize
        size = -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        if size > len(self.free):
            self.free = region(max(size, REGION_BYTES))
        begin, self.free = self.free[:num_bytes], self.free[size:]
        return begin.view(dtype)


def region(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of private memory, which the system provides as it is written."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
