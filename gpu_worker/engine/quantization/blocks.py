"""Blocks of weights: quants of 4 or 8 bits, with a scale and perhaps an offset for each block, as GGUF files
and quantised checkpoints have them.

A weight is quant * scale + offset of its block, computed in float32 and rounded to the model's dtype.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

LARGEST_BLOCK = 128
"""Inputs of a block: the kernels expand that many at once."""
SMALLEST_BLOCK = 16
"""Inputs: two words of quants of 4 bits."""


@dataclass
class Blocks:
    """The weights [outputs, inputs] of a linear layer.

    Attributes:
        quants: uint8 from 0 to 15, int8 or 8-bit floats; [outputs, inputs].
        scales: float16 or float32 [outputs, inputs / size]; of 8-bit floats a row may be one block.
        offsets: as `scales`; None where all are 0.
        codes: float32 [16], what quants of 4 bits stand for; None where they stand for themselves.
        order: int64 [inputs], of each input of these blocks its place among the layer's; None where they lie
            in turn.
    """

    quants: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    codes: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def bits(self) -> int:
        return 4 if self.quants.dtype == torch.uint8 else 8

    @property
    def size(self) -> int:
        return self.quants.shape[1] // self.scales.shape[1]

    @property
    def are_in_turn(self) -> bool:
        """Whether these are integers whose inputs lie in turn."""
        return self.order is None and not self.quants.dtype.is_floating_point

    def widen(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[outputs, inputs] of this dtype"""
        numbers = self.quants.float() if self.codes is None else self.codes[self.quants.long()]
        weights = numbers.view(len(self.quants), -1, self.size) * self.scales.float()[..., None]
        if self.offsets is not None:
            weights += self.offsets.float()[..., None]
        weights = weights.flatten(1).to(dtype)
        return weights if self.order is None else weights[:, self.order.argsort()]

    def halved(self) -> "Blocks":
        """The blocks with float16 scales and offsets, where these are the same numbers."""
        factors = [factor for factor in (self.scales, self.offsets) if factor is not None]
        if not all(torch.equal(factor.half().float(), factor.float()) for factor in factors):
            return self
        offsets = None if self.offsets is None else self.offsets.half()
        return replace(self, scales=self.scales.half(), offsets=offsets)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by field, as files have them: two quants of 4 bits a byte, the first in its lower half.
        Only integers whose inputs lie in turn have them.
        """
        quants = self.quants
        if self.bits == 4:
            quants = quants[:, ::2] | quants[:, 1::2] << 4
        fields = {"quants": quants, "scales": self.scales, "offsets": self.offsets}
        return {name: tensor.contiguous() for name, tensor in fields.items() if tensor is not None}

    def of_rows(self, rows: torch.Tensor) -> "Blocks":
        """The blocks of some outputs, integers [outputs]."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, quants=self.quants[rows], scales=self.scales[rows], offsets=offsets)

    def of_columns(self, begin: int, end: int) -> "Blocks | None":
        """The blocks of some inputs in turn, in smaller blocks where these begin or end within one; None
        where blocks would be too small, or the inputs of a block lie apart.
        """
        if self.quants.dtype.is_floating_point and self.scales.shape[1] == 1:
            return replace(self, quants=self.quants[:, begin:end])
        size = math.gcd(self.size, begin, end)
        if size < SMALLEST_BLOCK or self.order is not None:
            return None
        scales, offsets = (
            None
            if factor is None
            else factor.repeat_interleave(self.size // size, 1)[:, begin // size : end // size]
            for factor in (self.scales, self.offsets)
        )
        assert scales is not None
        return replace(self, quants=self.quants[:, begin:end], scales=scales, offsets=offsets)

    @classmethod
    def joined(cls, parts: "Sequence[Blocks]", rows: torch.Tensor) -> "Blocks | None":
        """The blocks of these rows of all parts, integers in turn, one below the other; None where they are
        of several kinds.
        """
        kinds = {(part.bits, part.size, part.scales.dtype, part.offsets is None) for part in parts}
        if len(kinds) > 1:
            return None
        offsets = [part.offsets for part in parts if part.offsets is not None]
        return cls(
            torch.cat([part.quants for part in parts])[rows],
            torch.cat([part.scales for part in parts])[rows],
            torch.cat(offsets)[rows] if offsets else None,
        )


FindBlocks = Callable[[str], Blocks | None]
"""Reads the blocks of a linear layer by its name, once; None for one that is not in blocks."""


def no_blocks(layer: str) -> None:
    """Of a model whose linear layers are all plain."""
