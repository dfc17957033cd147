"""Which ids a row has had, and how often."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

SPARE_COLUMNS = 64


class TokenCounts:
    """Distinct ids of one row with their counts: arrays that grow by one token at a time.

    Attributes:
        length: tokens of prompt and generation.
        size: how many distinct ids they have.
    """

    def __init__(self, prompt: npt.NDArray[np.int32], generated: Iterable[int]) -> None:
        ids, counts = np.unique(prompt, return_counts=True)
        self.length, self.size = len(prompt), len(ids)
        self.table = np.zeros((3, self.size + SPARE_COLUMNS), np.int64)
        self.table[0, : self.size], self.table[1, : self.size] = ids, counts
        self.places = {token: place for place, token in enumerate(ids.tolist())}
        for token in generated:
            self.add(token)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self.table[0, : self.size]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Of `ids`, in prompt and generation."""
        return self.table[1, : self.size]

    @property
    def generated(self) -> npt.NDArray[np.int64]:
        """Of `ids`, in the generation."""
        return self.table[2, : self.size]

    def add(self, token: int) -> None:
        """Takes a generated token."""
        place = self.places.setdefault(token, self.size)
        if place == self.size:
            self.append(token)
        self.table[1:, place] += 1
        self.length += 1

    def append(self, token: int) -> None:
        if self.size == self.table.shape[1]:
            self.table = np.concatenate((self.table, np.zeros_like(self.table)), axis=1)
        self.table[0, self.size] = token
        self.size += 1
