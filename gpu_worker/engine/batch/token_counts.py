"""Token counts of a row: its distinct ids, and how often each occurs. Penalties need them."""

from collections.abc import Iterable
from copy import copy

import numpy as np
import numpy.typing as npt

SPARE_COLUMNS = 64


class TokenCounts:
    """Distinct ids of one row with their counts, in an array that grows by one token at a time.

    Attributes:
        num_tokens: tokens of prompt and generation.
        num_distinct: distinct ids among them.
        table: int64 [3, columns]: ids, their counts, their counts in the generation; a column for each id.
        column_of: the column of an id.
    """

    def __init__(self, prompt: npt.NDArray[np.int32], generated: Iterable[int]) -> None:
        ids, counts = np.unique(prompt, return_counts=True)
        self.num_tokens = len(prompt)
        self.num_distinct = len(ids)
        self.table = np.zeros((3, self.num_distinct + SPARE_COLUMNS), np.int64)
        self.table[0, : self.num_distinct], self.table[1, : self.num_distinct] = ids, counts
        self.column_of = {token: place for place, token in enumerate(ids.tolist())}
        for token in generated:
            self.accept(token)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self.table[0, : self.num_distinct]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Counts of `ids` in prompt and generation."""
        return self.table[1, : self.num_distinct]

    @property
    def generated(self) -> npt.NDArray[np.int64]:
        """Counts of `ids` in the generation."""
        return self.table[2, : self.num_distinct]

    def accept(self, token: int) -> None:
        """Count a generated token."""
        place = self.column_of.setdefault(token, self.num_distinct)
        if place == self.num_distinct:
            self.add_column(token)
        self.table[1:, place] += 1
        self.num_tokens += 1

    def copy(self) -> "TokenCounts":
        """Counts that go on by themselves."""
        other = copy(self)
        other.table, other.column_of = self.table.copy(), self.column_of.copy()
        return other

    def add_column(self, token: int) -> None:
        if self.num_distinct == self.table.shape[1]:
            self.table = np.concatenate((self.table, np.zeros_like(self.table)), axis=1)
        self.table[0, self.num_distinct] = token
        self.num_distinct += 1
