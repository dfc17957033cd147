"""Proposers of rows: guesses that pay, and with a grammar the tokens that it forces before any guess."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from common.settings.speculation import NGRAM, SUFFIX, Speculation
from gpu_worker.engine.batch.proposer import ForcedProposer, Proposer
from gpu_worker.engine.batch.row import ProposerFactory
from gpu_worker.engine.batch.sampling_state import GrammarMask
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.drafting.acceptance import Acceptance, TrialBudget
from gpu_worker.engine.drafting.costs import ProposalCosts
from gpu_worker.engine.drafting.ngrams import NgramGuesser
from gpu_worker.engine.drafting.suffixes import RecentAnswers, SuffixGuesser

DEFAULT_COSTS = ProposalCosts()


class TokenGuesser(Protocol):
    """Guesses what follows a row's ids.

    Attributes:
        method: its name in metrics.
    """

    method: str

    def guess(self, count: int) -> list[int]:
        """At most `count` ids."""

    def append(self, tokens: Sequence[int]) -> None:
        """Take the row's next ids."""


class GuessProposer:
    """Proposes guesses as far as they pay.

    Attributes:
        num_speculated: most ids proposed at a time.
    """

    is_sure = False
    waits = False

    def __init__(
        self,
        num_speculated: int,
        guesser: TokenGuesser,
        budget: TrialBudget | None = None,
        costs: ProposalCosts = DEFAULT_COSTS,
    ) -> None:
        self.num_speculated = num_speculated
        self.costs = costs
        self.guesser = guesser
        self.acceptance = Acceptance(budget=budget or TrialBudget())
        self.method = guesser.method

    def propose(self, most: int, skipped: int = 0) -> list[int]:
        count = self.acceptance.num_worth(min(most, self.num_speculated), self.costs.of_one)
        return self.guesser.guess(skipped + count)[skipped:] if count else []

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        self.guesser.append(tokens)
        self.acceptance.learn(len(tokens), num_proposed, self.costs.of_one)


class GuidedProposer:
    """Proposes what the row's grammar forces; where it forces nothing, what `guessing` proposes up to the
    first token that the grammar forbids.
    """

    def __init__(self, grammar: GrammarMask, guessing: Proposer) -> None:
        self.grammar = grammar
        self.forcing = ForcedProposer(grammar)
        self.guessing = guessing
        self.newest: Proposer = self.forcing

    @property
    def is_sure(self) -> bool:
        return self.newest.is_sure

    @property
    def waits(self) -> bool:
        return self.guessing.waits

    @property
    def method(self) -> str:
        return self.newest.method

    def propose(self, most: int, skipped: int = 0) -> Sequence[int]:
        self.newest = self.forcing
        if forced := self.forcing.propose(most, skipped):
            return forced
        self.newest = self.guessing
        guessed = self.guessing.propose(most + skipped)
        return guessed[: self.grammar.num_allowed(guessed)][skipped:] if guessed else ()

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        self.guessing.learn(tokens, 0 if self.newest is self.forcing else num_proposed)


def make_proposer(make_guessing: ProposerFactory, ids: Int32, grammar: GrammarMask | None) -> Proposer | None:
    """The proposer of a row with these ids so far: of its grammar, of `make_guessing`, or of both; None if it
    has neither.
    """
    guessing = make_guessing(ids, grammar)
    if grammar is None:
        return guessing
    return GuidedProposer(grammar, guessing) if guessing else ForcedProposer(grammar)


def guessing_factory(speculation: Speculation, costs: ProposalCosts = DEFAULT_COSTS) -> ProposerFactory:
    """What makes the guessing proposers of rows for which no model proposes."""
    number, values = speculation.num_found, speculation.values
    budget = TrialBudget()
    answers = RecentAnswers(int(values["suffix_decoding_max_cached_requests"]))

    def make(ids: Int32, grammar: GrammarMask | None) -> Proposer | None:
        if speculation.method == NGRAM and number:
            lengths = int(values["prompt_lookup_min"]), int(values["prompt_lookup_max"])
            return GuessProposer(number, NgramGuesser(ids, *lengths), budget, costs)
        if speculation.method == SUFFIX:
            return GuessProposer(number, SuffixGuesser(ids, answers, values), budget, costs)
        return None

    return make


def proposer_factory(make_guessing: ProposerFactory) -> ProposerFactory:
    """What makes the proposers of rows, with and without grammars."""
    return partial(make_proposer, make_guessing)
