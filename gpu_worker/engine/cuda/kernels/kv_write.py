"""Triton kernels that write into the paged cache. Triton evaluates annotations of parameters: its own types
are safe.
"""

import torch
import triton
import triton.language as tl

WIDTH = 2048
"""Numbers that one program fills."""
MANTISSAS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
"""Bits of the mantissa, by the cache's dtype."""


@triton.jit  # type: ignore[untyped-decorator]
def to_float8(
    numbers: tl.tensor, scale: tl.tensor, mantissa: tl.constexpr, largest: tl.constexpr
) -> tl.tensor:
    """Divide numbers by `scale`, and return the bytes of the nearest 8-bit floats (ties to even), at most
    `largest` from zero. It computes with integers, since not every card has 8-bit floats.
    """
    bias: tl.constexpr = (1 << (6 - mantissa)) - 1
    shift: tl.constexpr = 23 - mantissa
    normal: tl.constexpr = (128 - bias) << 23
    least: tl.constexpr = (151 - bias - mantissa) << 23  # a float that rounds what is added to the least step
    quotient = tl.div_rn(numbers.to(tl.float32), scale)
    sign = (quotient.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.abs(quotient)
    size = tl.where(size > largest, largest, size)
    bits = size.to(tl.int32, bitcast=True)
    added = tl.full(size.shape, least, tl.int32).to(tl.float32, bitcast=True)
    small = (size + added).to(tl.int32, bitcast=True) - least
    large = (bits - normal + (1 << 23) + (1 << (shift - 1)) - 1 + ((bits >> shift) & 1)) >> shift
    rest = tl.where(bits < normal, small, large)
    return (sign | tl.where(size == size, rest, 0x7F)).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def write_line(
    keys: tl.tensor, values: tl.tensor, key: tl.tensor, value: tl.tensor, slots: tl.tensor,
    key_scale: tl.tensor, value_scale: tl.tensor,
    key_head: tl.tensor, key_token: tl.tensor, value_head: tl.tensor, value_token: tl.tensor,
    heads: tl.tensor, block_size: tl.tensor,
    key_dim: tl.constexpr, value_dim: tl.constexpr, width: tl.constexpr,
    mantissa: tl.constexpr, largest: tl.constexpr,
) -> None:  # fmt: skip
    """One program for a token and a head: copies its K and its V. `mantissa`: bits of the cache's 8-bit
    floats; 0 if the cache has the model's dtype.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    line = (slot // block_size * heads + head) * block_size + slot % block_size
    column = tl.arange(0, width)
    key_numbers = tl.load(key + head * key_head + token * key_token + column, mask=column < key_dim)
    if mantissa:
        key_numbers = to_float8(key_numbers, key_scale, mantissa, largest)
    tl.store(keys + line * key_dim + column, key_numbers, mask=column < key_dim)
    value_numbers = tl.load(value + head * value_head + token * value_token + column, mask=column < value_dim)
    if mantissa:
        value_numbers = to_float8(value_numbers, value_scale, mantissa, largest)
    tl.store(values + line * value_dim + column, value_numbers, mask=column < value_dim)


def write_keys_and_values(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[float, float],
) -> None:
    """keys and values [blocks, kv_heads, block_size, dim] of the cache's dtype, key and value [kv_heads,
    tokens, dim] of the model's; slots int [tokens]. As `write_kv` in attention/backend.py.
    """
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    heads, tokens, key_dim = key.shape
    strides = (key.stride(0), key.stride(1), value.stride(0), value.stride(1))
    dims = (key_dim, value.shape[2], triton.next_power_of_2(max(key_dim, value.shape[2])))
    form = (MANTISSAS.get(keys.dtype, 0), torch.finfo(keys.dtype).max)
    if keys.dtype in MANTISSAS:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    write_line[(tokens, heads)](
        keys, values, key, value, slots, *scales, *strides, heads, keys.shape[2], *dims, *form
    )


@triton.jit(do_not_specialize=["value", "num_blocks"])  # type: ignore[untyped-decorator]
def fill_block_part(
    store: tl.tensor, blocks: tl.tensor, value: tl.tensor, num_blocks: tl.tensor, page: tl.tensor,
    width: tl.constexpr
) -> None:  # fmt: skip
    """One program for a block, a tensor of the store, and `width` numbers of the block's page in that
    tensor.
    """
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    column = tl.program_id(2) * width + tl.arange(0, width)
    place = (tl.program_id(1).to(tl.int64) * num_blocks + block) * page
    tl.store(store + place + column, value, mask=column < page)


def fill_blocks(store: torch.Tensor, blocks: torch.Tensor, value: float) -> None:
    """store [tensors, blocks, kv_heads, block_size, dim] of any dtype, blocks int64 [n]. As `fill_kv` in
    attention/backend.py.
    """
    num_tensors, num_blocks, page = len(store), store.shape[1], store.stride(1)
    fill_block_part[(len(blocks), num_tensors, triton.cdiv(page, WIDTH))](
        store, blocks, value, num_blocks, page, WIDTH
    )


@triton.jit(do_not_specialize=["num_blocks"])  # type: ignore[untyped-decorator]
def copy_block_part(
    store: tl.tensor, sources: tl.tensor, targets: tl.tensor, num_blocks: tl.tensor, page: tl.tensor,
    width: tl.constexpr
) -> None:  # fmt: skip
    """One program for a pair of blocks, a tensor of the store, and `width` numbers of the blocks' pages in
    that tensor.
    """
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * num_blocks
    column = tl.program_id(2) * width + tl.arange(0, width)
    numbers = tl.load(store + (first + source) * page + column, mask=column < page)
    tl.store(store + (first + target) * page + column, numbers, mask=column < page)


def copy_blocks(store: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """store [tensors, blocks, kv_heads, block_size, dim] of any dtype, sources and targets int64 [n]. As
    `copy_kv` in attention/backend.py.
    """
    num_tensors, num_blocks, page = len(store), store.shape[1], store.stride(1)
    copy_block_part[(len(sources), num_tensors, triton.cdiv(page, WIDTH))](
        store, sources, targets, num_blocks, page, WIDTH
    )
