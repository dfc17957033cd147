"""Proposer: what proposes a row's next tokens; and proposals of a grammar that forces them (jump-forward).
gpu_worker/engine/drafting/ has those that guess.
"""

from collections.abc import Sequence
from typing import Protocol

from common.settings.speculation import GRAMMAR
from gpu_worker.engine.batch.sampling_state import GrammarMask

MAX_FORCED = 15
"""Proposals of a grammar at a time."""


class Proposer(Protocol):
    """Proposes what a row samples next; the model checks all proposals in one step."""

    @property
    def is_sure(self) -> bool:
        """Whether all proposals are sampled but for rare cases, so that the next step may be launched before
        they are checked.
        """

    @property
    def waits(self) -> bool:
        """Whether the next proposals need the tokens of the step in flight: the next step is launched only
        once that one is read.
        """

    @property
    def method(self) -> str:
        """Where the newest proposals come from, for metrics."""

    def propose(self, most: int, skipped: int = 0) -> Sequence[int]:
        """Return at most `most` ids that follow the next `skipped` ones, which the step in flight samples;
        none if proposals do not pay.
        """

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        """Take the tokens that a step with `num_proposed` proposals sampled: all but the last were
        proposed.
        """


class ForcedProposer:
    """Proposes the tokens that the row's grammar forces: they cost one step together."""

    is_sure = True
    waits = False
    method = GRAMMAR

    def __init__(self, grammar: GrammarMask) -> None:
        self.grammar = grammar

    def propose(self, most: int, skipped: int = 0) -> Sequence[int]:
        return self.grammar.forced(skipped + min(most, MAX_FORCED))[skipped:]

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        """Nothing to learn: the grammar has taken the tokens."""
