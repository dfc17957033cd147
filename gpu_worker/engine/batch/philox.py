"""Philox: the random numbers of a row's tokens, a pure function of seed, choice and index."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

BUFFERED = 64  # a whole number of Philox blocks
PER_BLOCK = 4  # numbers that Philox gives for one value of its counter
MASK = 2**64 - 1


def philox_uniforms(seed: int, choice: int, begin: int, count: int) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1) for the tokens from index `begin`, a multiple of 4, on.

    Philox-4x64 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with seed and choice,
    modulo 2**64, as its key and the index as its counter: a pure function of the three.
    """
    source = np.random.Philox(
        key=np.array([seed & MASK, choice & MASK], np.uint64), counter=begin // PER_BLOCK
    )
    return np.asarray((source.random_raw(count) >> np.uint64(11)) * 2.0**-53, np.float64)


@dataclass(slots=True, eq=False)
class PhiloxStream:
    """The random numbers of one row, computed 64 tokens at a time."""

    seed: int
    choice: int
    begin: int = -BUFFERED
    values: list[float] = field(default_factory=list)

    def at(self, index: int) -> float:
        """Return the number of the token of this index."""
        if not 0 <= index - self.begin < BUFFERED or not self.values:
            self.begin = index // BUFFERED * BUFFERED
            self.values = philox_uniforms(self.seed, self.choice, self.begin, BUFFERED).tolist()
        return self.values[index - self.begin]
