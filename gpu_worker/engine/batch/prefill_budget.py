"""Prefill budget: how many prompt tokens a step may have, and when rows of the class `batch` wait for one."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.messages.plan import Plan
from common.messages.request import LEAST_URGENT

BULK_SHARE = 3.0
"""Most tokens of bulk prompts in one step, as a multiple of what they have had in a step of late."""
BULK_MEMORY = 0.97
"""What is left of that mean after one step."""
TOKENS_PER_BULK_ROW = 8
"""Bulk rows that decode wait for callers' prompts of fewer tokens than this for each such row: only then do
they make the step much longer.
"""


def is_bulk(class_index: int) -> bool:
    return class_index >= LEAST_URGENT


@dataclass(slots=True)
class StepBudget:
    """What one step may have.

    Attributes:
        tokens: prompt tokens that are left, those of bulk prompts included.
        bulk_tokens: tokens of bulk prompts that are left.
        bulk_decodes: whether bulk rows decode in it.
    """

    tokens: int
    bulk_tokens: int
    bulk_decodes: bool = True

    def left(self, class_index: int) -> int:
        """Return how many tokens are left for a prompt of a class."""
        return min(self.tokens, self.bulk_tokens) if is_bulk(class_index) else self.tokens

    def spend(self, class_index: int, tokens: int) -> None:
        """Take `tokens` for a prompt of a class."""
        self.tokens -= tokens
        if is_bulk(class_index):
            self.bulk_tokens -= tokens


@dataclass(slots=True)
class PrefillBudget:
    """How many prompt tokens a step may have: as many as the grant says.

    Bulk rows, those of the class `batch`, fill what callers' rows leave. A caller waits for the rest of the
    step that runs when it comes, and then for its own prompt:

    - While callers are about (`bulk_tokens`), bulk prompts are spread over many steps, so that none is long.
      A step has at most BULK_SHARE times what steps have had of late, so a backlog is worked off.
    - A step with callers' prompts has no bulk prompts, and no bulk rows decode in it where they would make it
      much longer. Of two such steps in a row this holds for the first, so bulk rows never stand still; the
      second has `bulk_tokens` of bulk prompts at most.

    Attributes:
        bulk_pace: tokens of bulk prompts that a step has had of late.
        has_waited: whether bulk rows have waited for the last step.
    """

    bulk_pace: float = 0.0
    has_waited: bool = False

    def plan(self, grant: Plan, decoding: Sequence[int], prompts: Sequence[tuple[int, int]]) -> StepBudget:
        """Return the budget of a step in which rows of the classes `decoding` could decode, and `prompts` be
        computed, in this order: (class, tokens) of each. If a bulk prompt comes first, it has waited long
        enough.
        """
        num_bulk = sum(map(LEAST_URGENT.__le__, decoding))
        callers = sum(tokens for class_index, tokens in prompts if not is_bulk(class_index))
        bulk = sum(tokens for class_index, tokens in prompts if is_bulk(class_index))
        most = (grant.mixed_prefill_tokens if decoding else 0) or grant.prefill_tokens
        is_due = bool(callers and (bulk or num_bulk)) and not is_bulk(prompts[0][0])
        self.has_waited = is_due and not self.has_waited
        if self.has_waited:
            self.note_bulk(0)
            return StepBudget(most, 0, bulk_decodes=num_bulk * TOKENS_PER_BULK_ROW <= callers)
        if grant.bulk_tokens:
            pace = 0 if callers else round(BULK_SHARE * self.bulk_pace)
            num_steps = max(1, -(-bulk // max(grant.bulk_tokens, pace)))
            bulk = -(-bulk // num_steps)  # steps as equal as they can be: the longest is as short
        self.note_bulk(min(bulk, most))
        return StepBudget(most, min(bulk, most) if grant.bulk_tokens else most)

    def note_bulk(self, tokens: int) -> None:
        self.bulk_pace = BULK_MEMORY * self.bulk_pace + (1 - BULK_MEMORY) * tokens
