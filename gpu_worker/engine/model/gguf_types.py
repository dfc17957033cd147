"""Types of GGUF's tensors whose quants have 4 to 8 bits, as ggml-common.h of ggml lays them out: each is
unpacked to quants, scales and offsets.

`unpack` takes a matrix of bytes, [rows, bytes of a row]. A function of UNPACK takes blocks, uint8 [blocks,
bytes], and returns quants [blocks, weights], scales and offsets [blocks, parts], float32.
"""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Unpacked = tuple[Array, Array, Array | None]
PART = 32
"""Weights of a superblock's part that have one scale, in types with K in their name."""


def unpack(name: str, data: Array) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """→ quants [rows, inputs]: uint8 where they have 4 bits, else int8; scales and offsets, float32
    [rows, inputs / weights of a scale]
    """
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = np.ascontiguousarray(data).reshape(-1, num_bytes)
    rows = len(data)
    quants, scales, offsets = (
        None if array is None else torch.from_numpy(np.ascontiguousarray(array)).reshape(rows, -1)
        for array in UNPACK[name](blocks)
    )
    assert quants is not None and scales is not None
    return quants, scales, offsets


def halves(blocks: Array, at: int) -> Array:
    """The float16 number at a byte of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def nibbles(packed: Array) -> Array:
    """The lower halves of bytes [..., n], and then the upper ones: [..., 2 n]."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def fifth_bits(blocks: Array, at: int) -> Array:
    """The bits of a 32-bit word at a byte of each block, as 0 or 16: [blocks, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def unpack_q4_0(blocks: Array) -> Unpacked:
    scales = halves(blocks, 0)
    return nibbles(blocks[:, 2:]), scales, -8 * scales


def unpack_q4_1(blocks: Array) -> Unpacked:
    return nibbles(blocks[:, 4:]), halves(blocks, 0), halves(blocks, 2)


def unpack_q5_0(blocks: Array) -> Unpacked:
    quants = nibbles(blocks[:, 6:]) | fifth_bits(blocks, 2)
    return quants.astype(np.int8) - np.int8(16), halves(blocks, 0), None


def unpack_q5_1(blocks: Array) -> Unpacked:
    quants = nibbles(blocks[:, 8:]) | fifth_bits(blocks, 4)
    return quants.astype(np.int8), halves(blocks, 0), halves(blocks, 2)


def unpack_q8_0(blocks: Array) -> Unpacked:
    return blocks[:, 2:].view(np.int8), halves(blocks, 0), None


def unpack_q4_k(blocks: Array) -> Unpacked:
    packed = blocks[:, 16:].reshape(len(blocks), 4, PART)
    return nibbles(packed).reshape(len(blocks), -1), *part_factors(blocks)


def unpack_q5_k(blocks: Array) -> Unpacked:
    packed = blocks[:, 48:].reshape(len(blocks), 4, PART)
    parts = nibbles(packed).reshape(len(blocks), 8, PART)
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (parts | bits << 4).reshape(len(blocks), -1).astype(np.int8), *part_factors(blocks)


def unpack_q6_k(blocks: Array) -> Unpacked:
    low = nibbles(blocks[:, :128].reshape(len(blocks), 2, 64)).reshape(len(blocks), 2, 4, PART)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(len(blocks), 2, 1, PART) >> shifts & 3
    quants = (low | high << 4).reshape(len(blocks), -1).astype(np.int8) - np.int8(32)
    return quants, halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32), None


def part_factors(blocks: Array) -> tuple[Array, Array]:
    """Scales and offsets of the eight parts of Q4_K and Q5_K: 6 bits each, in 12 bytes."""
    packed = blocks[:, 4:16]
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 6) << 4], 1)
    offsets = np.concatenate([second & 63, (rest >> 4) | (second >> 6) << 4], 1)
    return halves(blocks, 0) * scales, -(halves(blocks, 2) * offsets)


UNPACK: dict[str, Callable[[Array], Unpacked]] = {
    "Q4_0": unpack_q4_0,
    "Q4_1": unpack_q4_1,
    "Q5_0": unpack_q5_0,
    "Q5_1": unpack_q5_1,
    "Q8_0": unpack_q8_0,
    "Q4_K": unpack_q4_k,
    "Q5_K": unpack_q5_k,
    "Q6_K": unpack_q6_k,
}
