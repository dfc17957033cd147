"""Writes into the paged cache: K and V of new tokens, on CUDA by one kernel for both; and one number into
whole blocks.
"""

import torch

from gpu_worker.engine.attention.kv_numbers import raw, to_kv


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Write in place. keys, values [blocks, kv_heads, block_size, dim] of the cache's dtype, contiguous; key,
    value [kv_heads, tokens, dim] of the model's dtype, with any strides of heads and tokens; slots int
    [tokens]: block * block_size + offset. `scales`: what 8-bit floats of K and of V are multiplied with.
    """
    if key.is_cuda:
        from gpu_worker.engine.cuda.kernels.kv_write import (
            write_keys_and_values,
        )  # Triton comes with torch's builds for CUDA only

        write_keys_and_values(keys, values, key, value, slots, scales)
    else:
        blocks, offsets = slots // keys.shape[2], slots % keys.shape[2]
        for pages, new, scale in zip((keys, values), (key, value), scales, strict=True):
            raw(pages)[blocks, :, offsets] = raw(to_kv(new.transpose(0, 1), pages.dtype, scale))


def fill_kv(store: torch.Tensor, blocks: torch.Tensor, value: float) -> None:
    """Fill in place. store [tensors, blocks, kv_heads, block_size, dim], contiguous; blocks int64 [n]. On
    CUDA torch would need one launch for every 2 GiB of a store, however few blocks are filled.
    """
    number = raw(torch.tensor(value).to(store.dtype)).item()
    if store.is_cuda:
        from gpu_worker.engine.cuda.kernels.kv_write import fill_blocks

        fill_blocks(raw(store), blocks, number)
    else:
        raw(store).index_fill_(1, blocks, number)
