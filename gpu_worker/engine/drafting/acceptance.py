"""Acceptance: how many proposals at a time pay, by how many were right so far, by what a proposal costs
(times that are measured at the start), and by what trials may lose. No tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

PROPOSAL_COST = 0.35
"""What it costs to check a proposal, as a share of a token's time: proposals pay if more are right."""
TRIAL_PROPOSALS = 12
"""Proposals before a row is judged."""
COUNT_DECAY = 0.9
"""Earlier counts are multiplied by it at each check."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 512
"""Tokens without proposals once they do not pay. Each pause is twice as long as the one before."""
LOSS_SHARE = 0.015
"""What trials may lose, as a share of the time of all tokens."""
FIRST_LOSS, MOST_LOSS = 2.0, 4.0
"""What trials may lose at first, and at once: times of a token."""
HOPED = 0.3
"""Checks that are added to each place, right as often as at the place before: what was not tried for long is
tried again.
"""


@dataclass(slots=True)
class TrialBudget:
    """What trials of all rows may lose, in times of a token. Each token adds a small share of its time, and
    proposals that are right add what they save.

    Attributes:
        left: negative where more was lost.
        is_open: whether proposals may be tried. Once all is lost they wait until a trial is worth while.
    """

    left: float = FIRST_LOSS
    is_open: bool = True

    def count(self, num_tokens: int, num_proposed: int, cost: float) -> None:
        """Count the tokens of a row's step, and what its proposals won or lost."""
        won = num_tokens - 1 - cost * num_proposed if num_proposed else 0.0
        self.left = min(MOST_LOSS, self.left + LOSS_SHARE * num_tokens + won)
        self.is_open = self.left > 0 if self.is_open else self.left >= FIRST_LOSS


@dataclass(slots=True)
class Acceptance:
    """What became of a row's proposals, by their place after the row's own token.

    Attributes:
        checked: by place, how often all proposals before were right; earlier checks count less and less.
        right: by place, how often this one was right, too.
        proposed: proposals that were checked, as `checked`.
        pause: tokens until the next proposal.
        next_pause: the length of the next pause.
        budget: that of all rows together.
        gate: that of all rows together, if it judges rows that have not proposed much, and pauses all of
            them.
    """

    checked: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    proposed: float = 0.0
    pause: int = 0
    next_pause: int = FIRST_PAUSE
    budget: TrialBudget = field(default_factory=TrialBudget)
    gate: "Acceptance | None" = None

    @property
    def is_paused(self) -> bool:
        paused = self.pause or (self.gate and self.gate.pause)
        return bool(paused or (self.is_on_trial and not self.budget.is_open))

    @property
    def is_on_trial(self) -> bool:
        """Whether too little was proposed to judge."""
        return self.judge.proposed < TRIAL_PROPOSALS

    @property
    def judge(self) -> "Acceptance":
        return self.gate if self.gate and self.proposed < TRIAL_PROPOSALS else self

    def num_worth(self, most: int, cost: float = PROPOSAL_COST) -> int:
        """How many proposals bring most tokens for their time: at most `most`, each at `cost`; 0 during a
        pause, which begins where none do.
        """
        if not most or cost >= 1 or self.is_paused:  # at such a cost none pays, even if all are right
            return 0
        count = most if self.is_on_trial else self.judge.best(most, cost)
        if not count:
            self.judge.give_up()
        return count

    def best(self, most: int, cost: float) -> int:
        """The number of proposals with the most tokens for their time, by the counts."""
        best, most_tokens, tokens, chance, share = 0, 1.0, 1.0, 1.0, 1.0
        for place in range(most):
            share = self.share_right(place, share)
            chance *= share
            tokens += chance
            if (value := tokens / (1 + cost * (place + 1))) > most_tokens:
                best, most_tokens = place + 1, value
        return best

    def share_right(self, place: int, share_before: float) -> float:
        """How often the proposal at a place is right if all before it are."""
        if place >= len(self.checked):
            return share_before
        return (self.right[place] + HOPED * share_before) / (self.checked[place] + HOPED)

    def learn(self, num_tokens: int, num_proposed: int, cost: float = PROPOSAL_COST) -> None:
        """Take what a step brought: its own token and, of `num_proposed`, those that were right."""
        self.budget.count(num_tokens, num_proposed, cost)
        for one in (self, *([self.gate] if self.gate else [])):
            one.pause = max(0, one.pause - num_tokens)
            if num_proposed:
                one.count(num_tokens - 1, num_proposed)
        if not num_proposed or self.proposed < TRIAL_PROPOSALS:
            return
        if self.best(num_proposed, cost):
            for one in filter(None, (self, self.gate)):
                one.next_pause = FIRST_PAUSE
        else:
            self.give_up()

    def count(self, num_right: int, num_proposed: int) -> None:
        """Count the places of one check."""
        missing = num_proposed - len(self.checked)
        self.checked += [0.0] * missing
        self.right += [0.0] * missing
        self.proposed = COUNT_DECAY * self.proposed + num_proposed
        for place in range(len(self.checked)):
            self.checked[place] = COUNT_DECAY * self.checked[place] + (
                place <= num_right and place < num_proposed
            )
            self.right[place] = COUNT_DECAY * self.right[place] + (place < num_right)

    def give_up(self) -> None:
        """Propose nothing for a while, then try again."""
        self.checked, self.right, self.proposed = [], [], 0.0
        self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, LONGEST_PAUSE)


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
