"""Grammar masks: what a grammar, a tool's schema or a watermark allows or favours as a row's next token."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


class GrammarMask(Protocol):
    """Implemented by grammars (a mask) and watermarks (a bias).

    Both are read after the forward is launched and may be computed while it runs: only the sampler waits.
    """

    def accept(self, token: int) -> None:
        """Takes the row's newest token; when a row resumes, first the tokens before."""

    def mask(self) -> Bits | None:
        """Returns the tokens that may come next, at least one: bit t % 32 of word t //
        32. None allows all.
        """

    def bias(self) -> Float32 | None:
        """Returns what is added to the scores, float32 [vocabulary]."""
