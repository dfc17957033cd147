"""The paged KV cache: for each layer one tensor of K and one of V, `[blocks, kv_heads, block_size, head_dim]`. Block 0 is scratch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.settings import SettingError


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a model keeps for each token, as its config tells before any weights are read."""

    num_layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any, block_size: int, dtype: torch.dtype) -> "Geometry":
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(config.num_hidden_layers, kv_heads, head_dim, block_size, dtype)

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.block_size * self.dtype.itemsize

    def num_blocks(self, kv_cache_bytes: int, available_bytes: int) -> int:
        """Blocks that may be granted; the scratch block comes on top. Raises SettingError."""
        if kv_cache_bytes > available_bytes:
            raise SettingError("kv_cache_bytes", f"{mib(kv_cache_bytes)} MiB, but only {mib(available_bytes)} MiB of memory are available")
        if kv_cache_bytes < self.block_bytes:
            block = f"one block of {self.block_size} tokens of this model takes {self.block_bytes} bytes"
            raise SettingError("kv_cache_bytes", f"{kv_cache_bytes} bytes are too few: {block}")
        return kv_cache_bytes // self.block_bytes


def mib(num_bytes: int) -> int:
    return num_bytes // 2**20


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On CPU the system hands out zeroed pages as they are first touched; `torch.zeros` would write a gigabyte at every start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class Cache:
    def __init__(self, geometry: Geometry, num_blocks: int, device: torch.device) -> None:
        shape = (num_blocks + 1, geometry.kv_heads, geometry.block_size, geometry.head_dim)
        layers = range(geometry.num_layers)
        self.keys = [zeros(shape, geometry.dtype, device) for _ in layers]
        self.values = [zeros(shape, geometry.dtype, device) for _ in layers]

    def fill(self, blocks: Sequence[int], value: float) -> None:
        index = torch.tensor(blocks, dtype=torch.int64, device=self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, index, value)
