"""Blocks of integers in the layout of the native kernels (kernels/blocks.h)."""

from dataclasses import dataclass

import torch

from gpu_worker.engine.blocks import Blocks
from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.large_pages import LargePages


@dataclass
class PackedBlocks:
    """Blocks as the kernels read them (kernels/blocks.h); `struct` points into the tensors."""

    tensors: list[torch.Tensor]
    struct: native.BlocksStruct


def pack_blocks(blocks: Blocks, panel: int, pages: LargePages) -> PackedBlocks:
    """Pack blocks in panels of so many outputs."""
    factors = [factor for factor in (blocks.scales, blocks.offsets) if factor is not None]
    tensors = [
        move(pack_quants(in_panels(blocks.quants, panel), blocks.bits), pages),
        *(move(in_panels(factor, panel).transpose(1, 2), pages) for factor in factors),
    ]
    quants, scales, offsets = (*(tensor.data_ptr() for tensor in tensors), None)[:3]
    half = blocks.scales.dtype == torch.float16
    struct = native.BlocksStruct(quants, scales, offsets, blocks.bits, blocks.size, half)
    return PackedBlocks(tensors, struct)


def pack_quants(quants: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 or int8 [panels, panel, inputs] → words, int32 [panels, inputs / (2 * pairs), panel, 2]"""
    pairs = 32 // bits
    places = quants.view(*quants.shape[:2], -1, pairs, 2).permute(0, 2, 1, 4, 3)  # [..., pairs]
    shifted = (places.int() & 2**bits - 1) << torch.arange(0, 32, bits, dtype=torch.int32)
    words: torch.Tensor = shifted.sum(-1, dtype=torch.int32)
    return words


def in_panels(tensor: torch.Tensor, panel: int) -> torch.Tensor:
    """[outputs, n], any dtype → [panels, panel, n], the last one filled up with zeros"""
    missing = -len(tensor) % panel
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing)).view(-1, panel, tensor.shape[1])


def move(tensor: torch.Tensor, pages: LargePages) -> torch.Tensor:
    """Copy numbers in their order into large pages: [numbers], of the same dtype."""
    to = pages.allocate(tensor.numel(), tensor.dtype)
    to.view(tensor.shape).copy_(tensor)
    return to
