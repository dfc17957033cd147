"""The ranks of a worker and what they say to each other. Numbers go where tensors are: gloo on CPU, NCCL on CUDA; words go over gloo."""

import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from gpu_worker.door import Grant
from gpu_worker.engine.frames import Frames
from gpu_worker.place import Place

FOREVER = timedelta(days=365)
"""The agent watches how long a step takes; ranks that have nothing to do wait for each other without an end."""


class Ranks:
    """Rank 0 decides: it hears the grants and samples. All others do what they are told, step by step.

    Only the sampled ids of rank 0 are taken. Each rank could sample the same by itself, but only where all compute the same numbers
    bit by bit, and ranks may run on processors of different kinds: a row must not go on with one id here and with another there.
    """

    def __init__(self, place: Place) -> None:
        """Returns when all ranks are there."""
        self.place, self.rank, self.world_size = place, place.rank, place.world_size
        if self.world_size > 1:
            address, backend = f"tcp://{place.address}:{place.port}", "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, init_method=address, rank=self.rank, world_size=self.world_size, timeout=FOREVER)

    # Tensors.

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def join(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The ranks' tensors, `sizes` wide, next to each other in the last dimension."""
        width = max(sizes)
        padded = torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1])).contiguous()
        parts = padded.new_empty(self.world_size, *padded.shape)
        dist.all_gather_into_tensor(parts, padded)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    # Numbers.

    def smallest(self, number: int) -> int:
        return self.reduced(number, dist.ReduceOp.MIN)

    def total(self, number: int) -> int:
        return self.reduced(number, dist.ReduceOp.SUM)

    def reduced(self, number: int, operation: dist.ReduceOp.RedOpType) -> int:
        value = torch.tensor(number)
        if self.world_size > 1:
            dist.all_reduce(value, operation)
        return int(value)

    # Words of rank 0.

    def tell(self, grants: Iterable[Grant]) -> None: ...
