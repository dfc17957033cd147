"""Prefill budget: how many prompt tokens a step of a worker may have. The engine keeps to it; a planner
foresees it.
"""

from dataclasses import dataclass
from typing import Protocol

BURST_STEPS = 8
"""The prompts that wait beside rows that decode take about this many steps, however long they are."""
TOKENS_PER_PAUSE = 112
"""A row that decodes pauses for prompts once in this many of its tokens: fewer than one gap in a hundred is
such a pause, so their 99th percentile does not contain it.
"""
MOST_PAUSES = 16.0
"""Pauses that may be left over from the time before."""


class PrefillGrant(Protocol):
    """What a grant, or a plan, says of prompts: fields of `Plan`."""

    @property
    def prefill_tokens(self) -> int: ...

    @property
    def mixed_prefill_tokens(self) -> int: ...

    @property
    def may_exceed(self) -> bool: ...


def even_part(waiting: int, most: int) -> int:
    """Return the tokens of the next step, at most `most`: `waiting` tokens take as few steps as they can, and
    equal ones, so that the longest of them is as short as it can be.
    """
    return -(-waiting // max(1, -(-waiting // most)))


@dataclass(slots=True)
class PrefillBudget:
    """How many prompt tokens a step may have.

    Beside rows that decode they are as many as the grant says, so that no step takes long. If the grant lets
    the engine exceed that, prompts which come together do not wait for many such steps:

    - All that wait are computed in about BURST_STEPS steps.
    - As long as it is rare, they have a whole step. Each row that decodes pauses for it once, where several
      middling steps would be as many long gaps for each row.

    Only prompts as urgent as the rows that decode make a step longer.

    Attributes:
        pauses: of one row each, that are left. A whole step may begin while there are any, for all rows.
    """

    pauses: float = MOST_PAUSES

    def tokens(self, grant: PrefillGrant, num_decoding: int, waiting: int, urgent: int) -> int:
        """Return the budget of a step in which `num_decoding` rows decode and `waiting` prompt tokens could
        be computed, `urgent` of them for requests that are as urgent.
        """
        whole = grant.prefill_tokens
        if not num_decoding or not grant.mixed_prefill_tokens:
            return whole
        most = min(whole, grant.mixed_prefill_tokens)
        if grant.may_exceed:
            most = min(whole, max(most, -(-urgent // BURST_STEPS)))
            if most < min(urgent, whole) and self.pauses > 0:
                self.pauses -= num_decoding
                return whole
            self.pauses = min(MOST_PAUSES, self.pauses + num_decoding / TOKENS_PER_PAUSE)
        return even_part(waiting, most)
