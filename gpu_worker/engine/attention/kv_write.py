"""Writes into the paged cache: K and V of new tokens, on CUDA by one kernel for both; and one number into
whole blocks.
"""

import torch

from gpu_worker.engine.attention.kv_numbers import raw


def write_kv(
    keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """In place. keys, values [blocks, kv_heads, block_size, dim], contiguous; key, value [kv_heads, tokens,
    dim], with any strides of heads and tokens; slots int [tokens]: block * block_size + offset.
    """
    if key.is_cuda:
        from gpu_worker.engine.cuda.kernels.kv_write import (
            write_keys_and_values,
        )  # Triton comes with torch's builds for CUDA only

        write_keys_and_values(keys, values, key, value, slots)
    else:
        blocks, offsets = slots // keys.shape[2], slots % keys.shape[2]
        keys[blocks, :, offsets] = key.transpose(0, 1)
        values[blocks, :, offsets] = value.transpose(0, 1)


def fill_kv(store: torch.Tensor, blocks: torch.Tensor, value: float) -> None:
    """In place. store [tensors, blocks, kv_heads, block_size, dim], contiguous; blocks int64 [n]. On CUDA
    torch would need one launch for every 2 GiB of a store, however few blocks are filled.
    """
    if store.is_cuda:
        from gpu_worker.engine.cuda.kernels.kv_write import fill_blocks

        fill_blocks(store, blocks, value)
    else:
        filling = torch.tensor(value).to(store.dtype)
        raw(store).index_fill_(1, blocks, raw(filling).item())
