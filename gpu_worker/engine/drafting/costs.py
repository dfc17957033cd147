"""Costs: what a proposal costs, as a share of a token's time, by times that are measured at the start."""

from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.engine.drafting.acceptance import PROPOSAL_COST

MANY_TOKENS = 16


@dataclass(slots=True)
class ProposalCosts:
    """Times of steps, and the number of rows in the next.

    A step of n tokens takes step_ms + (n - 1) * token_ms. So a proposal costs little where one row decodes,
    since weights are read once a step, and much where a step is bound by arithmetic.

    Attributes:
        step_ms: a step of one token.
        token_ms: each token more.
        draft_ms, draft_token_ms: the same of the model that proposes, for one proposal of each row.
    """

    step_ms: float = 1.0
    token_ms: float = PROPOSAL_COST
    draft_ms: float = 0.0
    draft_token_ms: float = 0.0
    num_rows: int = 1

    @property
    def of_one(self) -> float:
        """What one proposal costs, as a share of the time that its row's own token takes."""
        return self.of_drafted(self.num_rows)

    def of_drafted(self, num_drafting: int) -> float:
        """`of_one` where only so many rows were drafted for: they alone bear the draft's time."""
        others = self.num_rows - 1
        drafting_ms = self.draft_ms + (num_drafting - 1) * self.draft_token_ms
        per_proposal_ms = drafting_ms / num_drafting + self.token_ms
        return self.num_rows * per_proposal_ms / (self.step_ms + others * self.token_ms)

    def set(self, step_ms: float, token_ms: float, draft_ms: float, draft_token_ms: float) -> None:
        """Take times that were measured."""
        self.step_ms = step_ms
        self.token_ms = token_ms
        self.draft_ms = draft_ms
        self.draft_token_ms = draft_token_ms


def measure_steps(measure_ms: Callable[[int], float]) -> tuple[float, float]:
    """ms of a step of one token, and of each token more. `measure_ms`: of a step of so many tokens."""
    one_ms = measure_ms(1)
    return one_ms, max(0.0, measure_ms(MANY_TOKENS) - one_ms) / (MANY_TOKENS - 1)
