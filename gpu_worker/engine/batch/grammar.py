"""What something outside of the sampler says of each next token of a row: a grammar or a tool's schema by a
mask, a watermark by a bias.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


class GrammarMask(Protocol):
    """It is asked after the forward was launched, and may take its time while that runs: the sampler waits
    for it, nothing else does.
    """

    def accept(self, token: int) -> None:
        """The row's newest token; in a resume also those before."""

    def mask(self) -> Bits | None:
        """Tokens that may come next: bit t % 32 of word t // 32. At least one may. None is all."""

    def bias(self) -> Float32 | None:
        """What is added to the scores, [vocabulary]."""
