"""Proposals for a row's next tokens: prompt look-up in the row's own ids (speculation), and tokens that a
grammar forces (jump-forward).
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gpu_worker.engine.batch.sampling_state import GrammarMask
from gpu_worker.engine.batch.step_result import Int32

MIN_MATCH, MAX_MATCH = 2, 8
"""How many of the row's last ids are looked up, at least and at most."""
LEAST_RIGHT_SHARE = 0.35
"""Proposals pay if at least this share is right: a wrong one costs part of a token's time."""
TRIAL_PROPOSALS = 12
"""Proposals before a row is judged."""
COUNT_DECAY = 0.9
"""Earlier counts are multiplied by it at each check."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 256
"""Tokens without proposals once they do not pay. Each pause is twice as long as the one before."""
MAX_FORCED = 15
"""Proposals of a grammar at a time."""


class Proposer(Protocol):
    """Proposes what a row samples next; the model checks all proposals in one step.

    Attributes:
        is_sure: all proposals are sampled but for rare cases, so the next step may be launched before they
            are checked.
    """

    is_sure: bool

    def propose(self, most: int, skipped: int = 0) -> Sequence[int]:
        """Return at most `most` ids that follow the next `skipped` ones, which the step in flight samples;
        none if proposals do not pay.
        """

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        """Take the tokens that a step with `num_proposed` proposals sampled: all but the last were
        proposed.
        """


class NgramProposer:
    """Searches the row's last ids in the ids before them, and proposes what followed there. It prefers a
    longer match to a shorter one, then a newer to an older one.

    Attributes:
        num_speculated: most ids proposed at a time (SPECULATE).
        known: array whose first `length` ids are those of prompt and generation.
        proposed, right: how many proposals were checked and confirmed; earlier ones count less and less.
        pause, next_pause: tokens until the next proposal, and the length of the next pause.
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
        """Return what followed the match; past the end of the known ids the proposal repeats itself."""
        place = self.find() if self.pause == 0 else None
        if place is None:
            return []
        count = skipped + min(most, self.num_speculated)
        following: list[int] = self.known[place : min(place + count, self.length)].tolist()
        while len(following) < count:
            following.append(following[place + len(following) - self.length])
        return following[skipped:]

    def find(self) -> int | None:
        """The place after the longest earlier occurrence of the last ids."""
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
        self.proposed = COUNT_DECAY * self.proposed + num_proposed
        self.right = COUNT_DECAY * self.right + len(tokens) - 1
        if self.proposed < TRIAL_PROPOSALS:
            return
        if self.right >= LEAST_RIGHT_SHARE * self.proposed:
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
    """Proposes the tokens that the row's grammar forces: they cost one step together."""

    is_sure = True

    def __init__(self, grammar: GrammarMask) -> None:
        self.grammar = grammar

    def propose(self, most: int, skipped: int = 0) -> Sequence[int]:
        return self.grammar.forced(skipped + min(most, MAX_FORCED))[skipped:]

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        """Nothing to learn: the grammar has taken the tokens."""


def make_proposer(num_speculated: int, ids: Int32, grammar: GrammarMask | None) -> Proposer | None:
    """The proposer of a row with these ids so far: of its grammar, or of prompt look-up if `num_speculated`
    is not 0; else None.
    """
    if grammar is not None:
        return ForcedProposer(grammar)
    return NgramProposer(num_speculated, ids) if num_speculated else None
