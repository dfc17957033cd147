"""Blocks of weights: quants of 4 or 8 bits, with a scale and an offset for each block, as GGUF files, GPTQ
and AWQ have them.

A weight is quant * scale + offset of its block, computed in float32 and rounded to bfloat16.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.large_pages import LargePages

LARGEST_BLOCK = 128
"""Inputs: the kernels expand so many at once."""
SMALLEST_BLOCK = 16
"""Inputs: two words of quants of 4 bits."""


@dataclass
class Blocks:
    """The weights [outputs, inputs] of a linear layer.

    Attributes:
        quants: uint8 from 0 to 15, or int8; [outputs, inputs].
        scales: float16 or float32 [outputs, inputs / size].
        offsets: as `scales`; None where all are 0.
    """

    quants: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None

    @property
    def bits(self) -> int:
        return 4 if self.quants.dtype == torch.uint8 else 8

    @property
    def size(self) -> int:
        return self.quants.shape[1] // self.scales.shape[1]

    def widen(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[outputs, inputs] of this dtype"""
        quants = self.quants.view(len(self.quants), -1, self.size)
        weights = quants.float() * self.scales.float()[..., None]
        if self.offsets is not None:
            weights += self.offsets.float()[..., None]
        return weights.flatten(1).to(dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By field, as files have them: two quants of 4 bits a byte, the first in its lower half."""
        quants = self.quants
        if self.bits == 4:
            quants = quants[:, ::2] | quants[:, 1::2] << 4
        fields = {"quants": quants, "scales": self.scales, "offsets": self.offsets}
        return {name: tensor.contiguous() for name, tensor in fields.items() if tensor is not None}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "Blocks":
        quants = tensors["quants"]
        if quants.dtype == torch.uint8:
            quants = torch.stack([quants & 15, quants >> 4], 2).flatten(1)
        return cls(quants, tensors["scales"], tensors.get("offsets"))

    def of_rows(self, rows: torch.Tensor) -> "Blocks":
        """Of some outputs, integers [outputs]."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return Blocks(self.quants[rows], self.scales[rows], offsets)

    def of_columns(self, begin: int, end: int) -> "Blocks | None":
        """Of some inputs in turn, in smaller blocks where these begin or end within one; None where blocks
        would be too small.
        """
        size = math.gcd(self.size, begin, end)
        if size < SMALLEST_BLOCK:
            return None
        scales, offsets = (
            None
            if factor is None
            else factor.repeat_interleave(self.size // size, 1)[:, begin // size : end // size]
            for factor in (self.scales, self.offsets)
        )
        assert scales is not None
        return Blocks(self.quants[:, begin:end], scales, offsets)

    @classmethod
    def joined(cls, parts: "Sequence[Blocks]", rows: torch.Tensor) -> "Blocks | None":
        """These rows of all parts one below the other; None where they are of several kinds."""
        kinds = {(part.bits, part.size, part.scales.dtype, part.offsets is None) for part in parts}
        if len(kinds) > 1:
            return None
        offsets = [part.offsets for part in parts if part.offsets is not None]
        return cls(
            torch.cat([part.quants for part in parts])[rows],
            torch.cat([part.scales for part in parts])[rows],
            torch.cat(offsets)[rows] if offsets else None,
        )


@dataclass
class PackedBlocks:
    """Blocks as the kernels read them (kernels/blocks.h); `struct` points into the tensors."""

    tensors: list[torch.Tensor]
    struct: native.BlocksStruct


def pack_blocks(blocks: Blocks, panel: int, pages: LargePages) -> PackedBlocks:
    """In panels of so many outputs."""
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
    """The same numbers in their order, in large pages: [numbers], of the same dtype."""
    to = pages.allocate(tensor.numel(), tensor.dtype)
    to.view(tensor.shape).copy_(tensor)
    return to
