"""Proposals for a row's next tokens: prompt look-up, from the row's own ids (speculation), and what a grammar
forces (jump-forward).
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gpu_worker.engine.batch.sampling_state import GrammarMask
from gpu_worker.engine.batch.step_result import Int32

MIN_MATCH, MAX_MATCH = 2, 8
"""The row's last ids are looked up, at least and at most so many."""
LEAST_SHARE = 0.35
"""Of the proposals that must be right: a wrong one costs part of a token's time."""
TRIAL = 12
"""Proposals before a row is judged."""
MEMORY = 0.9
"""What is left of the former counts after one more check."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 256
"""Tokens without proposals once they do not pay; then they are tried again, and the next pause is twice as
long.
"""


MAX_FORCED = 15
"""Proposals of a grammar at a time."""


class Proposer(Protocol):
    """Proposes what a row samples next; the model checks all proposals in one step.

    Attributes:
        is_sure: but for rare cases all proposals are sampled, so a next step may be launched behind them
            before they are checked.
    """

    is_sure: bool

    def propose(self, most: int, skipped: int = 0) -> Sequence[int]:
        """Return at most `most` ids, in order, behind the next `skipped` ones, which are sampled by a step
        that is not read yet; none where that would not pay.
        """

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        """Take what a step sampled, of whose proposals all but the last of these tokens were right."""


class NgramProposer:
    """The row's last ids are searched in what stands before them, and what followed there is proposed. A
    longer match comes before a shorter, a newer one before an older.

    Attributes:
        num_speculated: most ids proposed at a time (SPECULATE).
        known: the ids of prompt and generation, the first `length` of this array.
        proposed, right: proposals checked and confirmed, of which earlier ones count ever less.
        pause, next_pause: tokens until the next proposal; how long the next pause is.
    """

    is_sure = False

    def __init__(self, num_speculated: int, ids: Int32) -> None:
        self.num_speculated = num_speculated
        self.known = np.array(ids, np.int32)
        self.length = len(ids)
        self.proposed = 0.0
        self.right = 0.0
        self.pause = 0
        self.next_pause = FIRST_PAUSE

    def propose(self, most: int, skipped: int = 0) -> list[int]:
        """Return what followed the match; a match that reaches into its own continuation repeats it."""
        place = self.find() if self.pause == 0 else None
        if place is None:
            return []
        count = skipped + min(most, self.num_speculated)
        following: list[int] = self.known[place : min(place + count, self.length)].tolist()
        while len(following) < count:
            following.append(following[place + len(following) - self.length])
        return following[skipped:]

    def find(self) -> int | None:
        """The place behind the longest earlier occurrence of the last ids."""
        known = self.known[: self.length]
        ends = np.flatnonzero(known[:-1] == known[-1])
        num_matched = 1 if ends.size else 0
        while ends.size and num_matched < min(MAX_MATCH, self.length - 1):
            longer = ends[ends >= num_matched]
            longer = longer[known[longer - num_matched] == known[-1 - num_matched]]
            if not longer.size:
                break
            ends, num_matched = longer, num_matched + 1
        return int(ends[-1]) + 1 if num_matched >= MIN_MATCH else None

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        """Take what a step sampled, and judge whether proposals pay."""
        self.append(tokens)
        self.pause = max(0, self.pause - len(tokens))
        if not num_proposed:
            return
        self.proposed = MEMORY * self.proposed + num_proposed
        self.right = MEMORY * self.right + len(tokens) - 1
        if self.proposed < TRIAL:
            return
        if self.right >= LEAST_SHARE * self.proposed:
            self.next_pause = FIRST_PAUSE
        else:
            self.proposed = self.right = 0.0
            self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, LONGEST_PAUSE)

    def append(self, tokens: Sequence[int]) -> None:
        end = self.length + len(tokens)
        if end > len(self.known):
            self.known = np.concatenate((self.known[: self.length], np.empty(end, np.int32)))
        self.known[self.length : end] = tokens
        self.length = end


class ForcedProposer:
    """Proposes what follows by the row's grammar alone: these tokens cost one step together."""

    is_sure = True

    def __init__(self, grammar: GrammarMask) -> None:
        self.grammar = grammar

    def propose(self, most: int, skipped: int = 0) -> Sequence[int]:
        return self.grammar.forced(skipped + min(most, MAX_FORCED))[skipped:]

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        """The grammar has taken them."""


def make_proposer(num_speculated: int, ids: Int32, grammar: GrammarMask | None) -> Proposer | None:
    """The proposer of a row with these ids so far, which speculates if `num_speculated` is not 0; None for a
    row without anything to propose.
    """
    if grammar is not None:
        return ForcedProposer(grammar)
    return NgramProposer(num_speculated, ids) if num_speculated else None
