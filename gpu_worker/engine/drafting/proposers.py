"""What proposes the next tokens of rows without a model: the tokens that a grammar forces, n-grams, suffixes.

N-grams: the last ids of a row are looked up in its own ids (prompt look-up).

Suffix decoding (arXiv:2411.04975): what a row writes next is found in its own ids and in the worker's recent
answers, by the longest suffix that occurs there. How often a token followed says how far a guess goes. An
index of pairs of ids finds the same places as a suffix tree, with less memory and constant work a token.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from common.settings.speculation import NGRAM, SUFFIX, Speculation
from gpu_worker.engine.batch.proposer import ForcedProposer, Proposer
from gpu_worker.engine.batch.row import ProposerFactory
from gpu_worker.engine.batch.sampling_state import GrammarMask
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.drafting.acceptance import Acceptance, ProposalCosts, TrialBudget


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


MAX_TOKENS = 2**17
"""Tokens of recent answers that are kept, at most; each takes about 150 bytes."""
MAX_PLACES = 64
"""Places of one pair of ids that are kept, and occurrences that are compared: the newest."""
MIN_SUFFIX = 2
"""How many of the last ids are looked up, at least: the index is of pairs."""

Place = tuple[Sequence[int] | Int32, int]
"""The ids of an answer, and the place of one that follows a match."""


@dataclass(slots=True)
class RecentAnswers:
    """Answers of the worker's rows, the newest: they grow while their rows run.

    Attributes:
        max_answers: how many are kept, at most; 0 keeps none.
        answers: by number, oldest first.
        places: (id, next id) → (answer, place after the pair), oldest first.
        num_tokens: of all answers.
        next_number: of the next answer.
    """

    max_answers: int
    max_tokens: int = MAX_TOKENS
    answers: dict[int, list[int]] = field(default_factory=dict)
    places: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    num_tokens: int = 0
    next_number: int = 0

    def begin(self) -> int:
        """The number of a new answer."""
        self.next_number += 1
        return self.next_number

    def append(self, number: int, tokens: Iterable[int]) -> None:
        """Append to an answer. One that was dropped begins anew."""
        if not self.max_answers:
            return
        answer = self.answers.setdefault(number, [])
        for token in tokens:
            answer.append(token)
            if len(answer) > 1:
                places = self.places.setdefault((answer[-2], token), [])
                places.append((number, len(answer)))
                if len(places) > MAX_PLACES:
                    del places[0]
            self.num_tokens += 1
        while len(self.answers) > self.max_answers or self.num_tokens > self.max_tokens:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        number = next(iter(self.answers))
        answer = self.answers.pop(number)
        self.num_tokens -= len(answer)
        for pair in {*pairwise(answer)}:
            kept = [place for place in self.places.get(pair, ()) if place[0] != number]
            if kept:
                self.places[pair] = kept
            else:
                self.places.pop(pair, None)

    def matches(self, tail: Sequence[int], own: int) -> tuple[list[Place], int]:
        """The places after the longest occurrences of the end of `tail` in answers but `own`, newest first,
        and how many ids these are.
        """
        if len(tail) < MIN_SUFFIX:
            return [], 0
        found = reversed(self.places.get((tail[-2], tail[-1]), []))
        places = [(self.answers[number], place) for number, place in found if number != own]
        lengths = [match_length(tail, answer, place) for answer, place in places]
        longest = max(lengths, default=0)
        return [one for one, length in zip(places, lengths, strict=True) if length == longest], longest


def match_length(tail: Sequence[int], ids: Sequence[int], place: int) -> int:
    """How many ids before a place are those at the end of `tail`."""
    length = 0
    while length < min(len(tail), place) and tail[-1 - length] == ids[place - 1 - length]:
        length += 1
    return length


def most_frequent(
    places: Sequence[Place], count: int, min_prob: float, repeats: bool = False
) -> tuple[list[int], float]:
    """The ids that followed most often at the places, at most `count`, as long as their probability is
    `min_prob`; and the sum of these probabilities: how many are right, as expected. Past the end of the ids a
    guess that `repeats` goes on with itself.
    """
    tokens: list[int] = []
    expected, probability = 0.0, 1.0
    for step in range(count):
        followers = [follower(ids, place + step, tokens if repeats else ()) for ids, place in places]
        counts = Counter(token for token in followers if token is not None)
        if not counts:
            break
        token, number = counts.most_common(1)[0]
        probability *= number / len(places)
        if probability < min_prob:
            break
        expected += probability
        tokens.append(token)
        places = [one for one, own in zip(places, followers, strict=True) if own == token]
    return tokens, expected


def follower(ids: Sequence[int] | Int32, place: int, guessed: Sequence[int]) -> int | None:
    """The id at a place; past the end that of the guess; None past the end of both."""
    if place < len(ids):
        return int(ids[place])
    past = place - len(ids)
    return guessed[past] if past < len(guessed) else None


class Guesser:
    """Guesses what follows a row's last ids.

    By suffixes: what followed most often in the row's own text, or in recent `answers`, where more is
    expected to be right; a guess is as long as the match, times `suffix_decoding_max_spec_factor`. By n-grams
    (without `answers`): what followed the newest of the longest occurrences in the row's own text.
    """

    def __init__(self, ids: Int32, values: Mapping[str, float], answers: RecentAnswers | None = None) -> None:
        self.text = RowIds(ids)
        self.answers = answers
        self.method = SUFFIX if answers else NGRAM
        self.number = answers.begin() if answers else 0
        self.min_match = MIN_SUFFIX if answers else int(values["prompt_lookup_min"])
        longest = "suffix_decoding_max_tree_depth" if answers else "prompt_lookup_max"
        self.max_match = int(values[longest])
        self.factor = values["suffix_decoding_max_spec_factor"]
        self.min_prob = values["suffix_decoding_min_token_prob"]

    def guess(self, count: int) -> list[int]:
        """At most `count` ids."""
        known = self.text.known[: self.text.length]
        places, own_length = self.text.matches(self.min_match, self.max_match)
        own = [(known, place) for place in reversed(places[-MAX_PLACES:])]
        if not self.answers:
            return most_frequent(own[:1], count, min_prob=0, repeats=True)[0]
        others, length = self.answers.matches(known[-self.max_match :].tolist(), self.number)
        found = most_frequent(own, min(count, self.longest(own_length)), self.min_prob, repeats=True)
        other = most_frequent(others, min(count, self.longest(length)), self.min_prob)
        return found[0] if (found[1], own_length) >= (other[1], length) else other[0]

    def longest(self, match_length: int) -> int:
        """How long a guess may be after a match of so many ids."""
        return int(self.factor * match_length)

    def append(self, tokens: Sequence[int]) -> None:
        """Take the row's next ids."""
        self.text.append(tokens)
        if self.answers:
            self.answers.append(self.number, tokens)


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
        guesser: Guesser,
        budget: TrialBudget | None = None,
        costs: ProposalCosts | None = None,
    ) -> None:
        self.num_speculated = num_speculated
        self.costs = costs or ProposalCosts()
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


def guessing_factory(speculation: Speculation, costs: ProposalCosts | None = None) -> ProposerFactory:
    """What makes the guessing proposers of rows for which no model proposes."""
    number, values = speculation.num_found, speculation.values
    budget, is_suffix = TrialBudget(), speculation.method == SUFFIX
    answers = RecentAnswers(int(values["suffix_decoding_max_cached_requests"])) if is_suffix else None

    def make(ids: Int32, grammar: GrammarMask | None) -> Proposer | None:
        return GuessProposer(number, Guesser(ids, values, answers), budget, costs) if number else None

    return make


def proposer_factory(make_guessing: ProposerFactory) -> ProposerFactory:
    """What makes the proposers of rows, with and without grammars."""
    return partial(make_proposer, make_guessing)
