"""What something outside of the sampler says of each next token of a row: a grammar or a tool's schema by a
mask, a watermark by a bias.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.batch.to_device import upload

Bits = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


class Guide(Protocol):
    """It is asked after the forward was launched, and may take its time while that runs: the sampler waits
    for it, nothing else does.
    """

    def take(self, token: int) -> None:
        """The row's newest token; in a resume also those before."""

    def mask(self) -> Bits | None:
        """Tokens that may come next: bit t % 32 of word t // 32. At least one may. None is all."""

    def bias(self) -> Float32 | None:
        """What is added to the scores, [vocabulary]."""


def steer(scores: torch.Tensor, guides: Sequence[Guide | None]) -> None:
    """In place. scores [rows, vocabulary]; what no mask and no bias speaks of stays as it is, also tokens
    beyond their ends.
    """
    biases = {row: bias for row, guide in enumerate(guides) if guide and (bias := guide.bias()) is not None}
    masks = {row: mask for row, guide in enumerate(guides) if guide and (mask := guide.mask()) is not None}
    if biases:
        values = upload(np.stack(list(biases.values())), scores.device)[:, : scores.shape[1]]
        scores[:, : values.shape[1]].index_add_(0, upload(list(biases), scores.device), values)
    if masks:
        rows = upload(list(masks), scores.device)
        barred = ~allowed(upload(np.stack(list(masks.values())), scores.device))[:, : scores.shape[1]]
        heads = scores[:, : barred.shape[1]]
        heads.index_copy_(0, rows, heads.index_select(0, rows).masked_fill_(barred, float("-inf")))


def allowed(bits: torch.Tensor) -> torch.Tensor:
    """int32 [rows, words] → bool [rows, 32 * words]"""
    return (
        ((bits[..., None] >> torch.arange(32, dtype=torch.int32, device=bits.device)) & 1).bool().flatten(1)
    )
