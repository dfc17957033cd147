"""K and V of new tokens into the paged cache: on CUDA one kernel for both, elsewhere two assignments."""

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPU comes without it
    triton = None


def write(keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """In place. keys, values [blocks, kv_heads, block_size, dim], contiguous; key, value [kv_heads, tokens, dim], with any strides of heads
    and tokens; slots int [tokens]: block * block_size + offset."""
    if key.is_cuda:
        write_both(keys, values, key, value, slots)
    else:
        blocks, offsets = slots // keys.shape[2], slots % keys.shape[2]
        keys[blocks, :, offsets] = key.transpose(0, 1)
        values[blocks, :, offsets] = value.transpose(0, 1)


def write_both(keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    heads, tokens, key_dim = key.shape
    value_dim, block_size = value.shape[2], keys.shape[2]
    strides = (key.stride(0), key.stride(1), value.stride(0), value.stride(1))
    dims = (key_dim, value_dim, triton.next_power_of_2(max(key_dim, value_dim)))
    kernel[(tokens, heads)](keys, values, key, value, slots, *strides, heads, block_size, *dims)


def write_line(
    keys: Any, values: Any, key: Any, value: Any, slots: Any,
    key_head: Any, key_token: Any, value_head: Any, value_token: Any, heads: Any, block_size: Any,
    key_dim: "tl.constexpr", value_dim: "tl.constexpr", width: "tl.constexpr",
) -> None:  # fmt: skip
    """One program for a token and a head: the numbers of its K and of its V, each next to each other on both sides."""
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    line = (slot // block_size * heads + head) * block_size + slot % block_size
    column = tl.arange(0, width)
    numbers = tl.load(key + head * key_head + token * key_token + column, mask=column < key_dim)
    tl.store(keys + line * key_dim + column, numbers, mask=column < key_dim)
    numbers = tl.load(value + head * value_head + token * value_token + column, mask=column < value_dim)
    tl.store(values + line * value_dim + column, numbers, mask=column < value_dim)


kernel: Any = triton.jit(write_line) if triton else None
