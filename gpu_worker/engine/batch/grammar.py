"""Grammar masks: what a grammar allows as a row's next token."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.int32]


class GrammarMask(Protocol):
    """Implemented by grammars. A mask is read after the forward is launched and may be computed while it
    runs: only the sampler waits.
    """

    def is_ready(self) -> bool:
        """Tell whether the next token can be sampled: a grammar takes time to compile."""

    def must_end(self) -> bool:
        """Tell whether only an end-of-sequence token may come next."""

    def accept(self, token: int) -> str:
        """Take the row's newest token. Returns why the row fails: `grammar`, which does not allow it, or
        `grammar_limit`; "" if it goes on.
        """

    def after(self, token: int) -> "GrammarMask":
        """A copy that has taken one more token."""

    def forced(self, most: int) -> Sequence[int]:
        """The next tokens, at most so many, as far as no others may come."""

    def mask(self) -> Bits | None:
        """Return the tokens that may come next, at least one: bit t % 32 of word t //
        32. None allows all.
        """
