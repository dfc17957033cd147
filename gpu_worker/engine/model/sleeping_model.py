"""Sleeping model: one without a cache, whose weights wait in memory of the host until it is needed again.

On CPU the weights stay where they are. On a GPU the storages of all parameters and buffers are copied to
pinned memory and freed; tensors, and views of them, stay the same objects, so compiled layers stay valid.
Captured graphs do not: they have addresses.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch


@dataclass(slots=True)
class SleepingModel:
    """What a model needs to go on.

    Attributes:
        storages: of the weights on a GPU, each once; none on CPU.
        num_blocks: blocks that its cache had.
        spare_bytes: memory of the GPU that it left free while it was awake.
        copies: uint8 [bytes] in pinned memory, one for each storage.
    """

    device: torch.device
    storages: list[torch.UntypedStorage]
    num_blocks: int
    spare_bytes: int
    copies: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, models: Iterable[Any], device: torch.device, num_blocks: int) -> "SleepingModel":
        """The modules as they are, awake, with a cache."""
        if device.type == "cpu":
            return cls(device, [], num_blocks, 0)
        tensors = (tensor for model in models for tensor in chain(model.parameters(), model.buffers()))
        storages = unique_storages(tensors)
        return cls(device, storages, num_blocks, torch.cuda.mem_get_info(device)[0])

    def offload(self) -> None:
        """Copy the weights to the host, and free the memory that they had."""
        self.copies = [to_host(storage) for storage in self.storages]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the copies are complete
        for storage in self.storages:
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Copy the weights back. Raises torch.OutOfMemoryError."""
        for storage, copy in zip(self.storages, self.copies, strict=True):
            storage.resize_(len(copy))
            bytes_of(storage).copy_(copy, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # before the copies are freed
        self.copies = []

    def blocks_left(self, block_bytes: int, states_bytes: int = 0) -> int:
        """Blocks that the cache gets: as many as before if so much memory is free beside the rows' states.
        Raises MemoryError if there is room for none.
        """
        if self.device.type == "cpu" or not block_bytes:
            return self.num_blocks
        torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info(self.device)[0] - self.spare_bytes - states_bytes
        num_blocks = min(self.num_blocks, free_bytes // block_bytes - 1)  # one more is the scratch block
        if num_blocks < 1:
            raise MemoryError(f"the GPU has {free_bytes} bytes for a cache whose blocks take {block_bytes}")
        return num_blocks


def unique_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages of tensors [...] of any dtype, each once: tied weights and views share one."""
    found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in found.values() if storage.nbytes()]


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A view of a storage → uint8 [bytes]"""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    """A copy in memory of the host → uint8 [bytes], pinned if it comes from a GPU."""
    is_on_gpu = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_on_gpu)
    return copy.copy_(bytes_of(storage), non_blocking=is_on_gpu)
