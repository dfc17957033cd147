"""Grid: the integers that weights are rounded to, with a scale and a zero for each group of inputs."""

from dataclasses import dataclass

import torch

SHRINKS = [1 - step / 20 for step in range(11)]
"""Parts of a group's range that are tried: a narrower one clips the largest weights, and has finer steps."""


@dataclass(frozen=True)
class Rounded:
    """The weights of a layer as integers: (quant - zero) * scale.

    Attributes:
        quants: uint8 [outputs, inputs].
        scales: float32 [outputs, groups], numbers that the checkpoint's dtype has.
        zeros: float32 [outputs, groups], whole numbers.
    """

    quants: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def widen(self) -> torch.Tensor:
        """float32 [outputs, inputs]"""
        size = self.quants.shape[1] // self.scales.shape[1]
        scales, zeros = (table.repeat_interleave(size, 1) for table in (self.scales, self.zeros))
        return (self.quants.float() - zeros) * scales


@dataclass(frozen=True)
class Grid:
    """Integers from 0 to 2**bits - 1. In a `symmetric` grid the zero is the middle. Scales are numbers of
    `dtype`.
    """

    bits: int
    symmetric: bool
    dtype: torch.dtype

    @property
    def highest(self) -> int:
        return int(2**self.bits) - 1

    def fit(
        self, groups: torch.Tensor, importance: torch.Tensor | None = None, shrinks: list[float] = SHRINKS
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zeros, float32 [..., 1], for groups of weights float32 [..., numbers] such that the sum
        of squared errors, each times its `importance` [..., numbers], is the least.
        """
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        if self.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        best, least = self.spread(low, high), torch.full_like(low, torch.inf)
        for shrink in shrinks if len(shrinks) > 1 else ():
            scales, zeros = self.spread(low * shrink, high * shrink)
            errors = (self.nearest(groups, scales, zeros) - groups) ** 2
            total = (errors if importance is None else errors * importance).sum(-1, keepdim=True)
            better = total < least
            best = torch.where(better, scales, best[0]), torch.where(better, zeros, best[1])
            least = torch.where(better, total, least)
        return best

    def spread(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zeros for the range of each group, all float32 [..., 1]."""
        scales = ((high - low) / self.highest).to(self.dtype).float()
        scales = torch.where(scales > 0, scales, 1.0)
        if self.symmetric:
            return scales, torch.full_like(scales, (self.highest + 1) // 2)
        return scales, (-low / scales).round().clamp(0, self.highest)

    def round(self, weights: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        """Quants, float32 as the weights [..., numbers]."""
        return (weights / scales + zeros).round().clamp(0, self.highest)

    def nearest(self, weights: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        """The numbers of the grid next to the weights, float32 [..., numbers]."""
        return (self.round(weights, scales, zeros) - zeros) * scales

    def round_groups(
        self,
        weight: torch.Tensor,
        size: int,
        importance: torch.Tensor | None = None,
        shrinks: list[float] = SHRINKS,
    ) -> Rounded:
        """Round weights float32 [outputs, inputs] in groups of `size`; `importance` float32 [inputs]"""
        groups = weight.view(len(weight), -1, size)
        scales, zeros = self.fit(groups, None if importance is None else importance.view(-1, size), shrinks)
        quants = self.round(groups, scales, zeros).to(torch.uint8)
        return Rounded(quants.flatten(1), scales[..., 0], zeros[..., 0])
