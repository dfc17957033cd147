"""The Triton kernel that writes K and V of a step into the paged cache."""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def write_line(
    keys: Any, values: Any, key: Any, value: Any, slots: Any,
    key_head: Any, key_token: Any, value_head: Any, value_token: Any, heads: Any, block_size: Any,
    key_dim: tl.constexpr, value_dim: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    """One program for a token and a head: the numbers of its K and of its V, each next to each other on both sides."""
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    line = (slot // block_size * heads + head) * block_size + slot % block_size
    column = tl.arange(0, width)
    key_numbers = tl.load(key + head * key_head + token * key_token + column, mask=column < key_dim)
    tl.store(keys + line * key_dim + column, key_numbers, mask=column < key_dim)
    value_numbers = tl.load(value + head * value_head + token * value_token + column, mask=column < value_dim)
    tl.store(values + line * value_dim + column, value_numbers, mask=column < value_dim)


def write_both(keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """As `write`. The numbers of a head lie next to each other."""
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    heads, tokens, key_dim = key.shape
    strides = (key.stride(0), key.stride(1), value.stride(0), value.stride(1))
    dims = (key_dim, value.shape[2], triton.next_power_of_2(max(key_dim, value.shape[2])))
    write_line[(tokens, heads)](keys, values, key, value, slots, *strides, heads, keys.shape[2], *dims)
