"""N-grams: the last ids of a row are looked up in its own ids (prompt look-up)."""

from collections.abc import Sequence

import numpy as np

from gpu_worker.engine.batch.step_result import Int32

MIN_MATCH, MAX_MATCH = 2, 8
"""How many of the row's last ids are looked up, at least and at most."""


class RowIds:
    """The ids of a row, prompt and generation, as they grow.

    Attributes:
        known: array whose first `length` ids are those of prompt and generation.
    """

    def __init__(self, ids: Int32) -> None:
        self.known = np.array(ids, np.int32)
        self.length = len(ids)

    @property
    def last(self) -> int:
        return int(self.known[self.length - 1])

    def append(self, tokens: Sequence[int]) -> None:
        end = self.length + len(tokens)
        if end > len(self.known):
            self.known = np.concatenate((self.known[: self.length], np.empty(end, np.int32)))
        self.known[self.length : end] = tokens
        self.length = end

    def matches(self, min_match: int, max_match: int) -> tuple[list[int], int]:
        """The places after the longest earlier occurrences of the last ids, oldest first, and how many ids
        these are; none below `min_match`.
        """
        known = self.known[: self.length]
        ends = np.flatnonzero(known[:-1] == known[-1])
        num_matched = 1 if ends.size else 0
        while ends.size and num_matched < min(max_match, self.length - 1):
            longer = ends[ends >= num_matched]
            longer = longer[known[longer - num_matched] == known[-1 - num_matched]]
            if not longer.size:
                break
            ends, num_matched = longer, num_matched + 1
        return ((ends + 1).tolist(), num_matched) if num_matched >= min_match else ([], 0)


class NgramGuesser:
    """Guesses what followed the last ids before: a longer match is preferred to a shorter one, then a newer
    to an older one.
    """

    method = "ngram"

    def __init__(self, ids: Int32, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH) -> None:
        self.text = RowIds(ids)
        self.min_match = min_match
        self.max_match = max_match

    def guess(self, count: int) -> list[int]:
        """What followed the match; past the end of the known ids the guess repeats itself."""
        places, _ = self.text.matches(self.min_match, self.max_match)
        if not places:
            return []
        place, length = places[-1], self.text.length
        following: list[int] = self.text.known[place : min(place + count, length)].tolist()
        while len(following) < count:
            following.append(following[place + len(following) - length])
        return following

    def append(self, tokens: Sequence[int]) -> None:
        self.text.append(tokens)
