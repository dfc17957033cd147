"""A proposer that knows what a row will sample, and is wrong at places that a seed chooses."""

import random
from collections.abc import Mapping, Sequence

import numpy as np

from gpu_worker.engine.batch.sampling_state import GrammarMask
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.drafting.proposers import Proposer


class KnowingProposer(Proposer):
    """Proposes `answer`, from a place on, with a share `wrong` of other ids.

    Attributes:
        steps: how many tokens each step brought that checked proposals.
    """

    waits = False
    method = "knowing"
    drafts_by = ""

    def __init__(
        self,
        answer: Sequence[int],
        place: int,
        wrong: float,
        seed: int,
        steps: list[int],
        num_speculated: int,
        is_sure: bool,
    ) -> None:
        self.answer = answer
        self.place = place
        self.wrong = wrong
        self.random = random.Random(seed)
        self.steps = steps
        self.num_speculated = num_speculated
        self.is_sure = is_sure

    def propose(self, most: int, skipped: int = 0) -> list[int]:
        count = self.random.randint(0, min(most, self.num_speculated))
        right = self.answer[self.place + skipped : self.place + skipped + count]
        return [abs(token - (self.random.random() < self.wrong)) for token in right]

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        self.place += len(tokens)
        if num_proposed:
            self.steps.append(len(tokens))


class KnowingProposers:
    """Makes one for each row, of up to `num_speculated` tokens at a time. `answers`: what follows a prompt;
    `steps`: as of the proposers, of all rows.
    """

    num_speculated = 4

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]],
        wrong: float,
        is_sure: bool = False,
    ) -> None:
        self.answers = answers
        self.wrong = wrong
        self.is_sure = is_sure
        self.steps: list[int] = []

    def __call__(self, ids: Int32, grammar: GrammarMask | None) -> Proposer:
        known = tuple(np.asarray(ids).tolist())
        prompt = max((one for one in self.answers if known[: len(one)] == one), key=len)
        return KnowingProposer(
            self.answers[prompt],
            len(known) - len(prompt),
            self.wrong,
            len(known),
            self.steps,
            self.num_speculated,
            self.is_sure,
        )
