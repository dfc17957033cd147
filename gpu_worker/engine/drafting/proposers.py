"""What proposes the next tokens of rows: their grammars (jump-forward), n-grams, suffixes, or a drafter.

N-grams: the last ids of a row are looked up in its own ids (prompt look-up).

Suffix decoding (arXiv:2411.04975): what a row writes next is found in its own ids and in the worker's recent
answers, by the longest suffix that occurs there. How often a token followed says how far a guess goes. An
index of pairs of ids finds the same places as a suffix tree, with less memory and constant work a token.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from common.settings.speculation import GRAMMAR, NGRAM, SUFFIX, Speculation
from gpu_worker.engine.batch.sampling_state import GrammarMask
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.drafting.acceptance import FIRST_PAUSE, Acceptance, ProposalCosts, TrialBudget

MAX_FORCED = 15
"""Proposals of a grammar at a time."""
MAX_UNREADY = 2
"""Drafts in vain: heads are ready at the second, and a model once it has computed the row so far."""


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


class Proposer:
    """Proposes what a row samples next; the model checks all proposals in one step.

    They are what the row's grammar forces. Where it forces nothing, they are what the row's guesser finds, or
    what a drafter has left here, up to the first token that the grammar forbids, and as far as they pay.

    Attributes:
        most: ids that are guessed or drafted at a time, at most; 0 for none.
        guesser: None where a drafter drafts, or `most` is 0.
        text: the row's ids, those sampled included.
        is_sure: all proposals are sampled but for rare cases, so the next step may be launched before they
            are checked.
        kv_len: of the ids, whose K and V the draft's cache has; None while nobody has looked.
        drafted: the next proposals of the drafter.
        num_drafting: rows that the last draft was for; 0 for all.
        num_unready: drafts since the last one that brought proposals.
        states: hidden states [tokens, any] of the last step with samples, and the position of the first.
    """

    def __init__(
        self,
        ids: Int32,
        grammar: GrammarMask | None = None,
        most: int = 0,
        acceptance: Acceptance | None = None,
        costs: ProposalCosts | None = None,
        guesser: Guesser | None = None,
        drafts_by: str = "",
    ) -> None:
        self.grammar = grammar
        self.most = most
        self.acceptance = acceptance or Acceptance()
        self.costs = costs or ProposalCosts()
        self.guesser = guesser
        self.drafts_by = drafts_by
        self.text = guesser.text if guesser else RowIds(ids)
        self.is_sure = most == 0
        self.kv_len: int | None = None
        self.states: Any = None
        self.drafted: Sequence[int] = ()
        self.num_drafting = 0
        self.num_unready = 0

    @property
    def waits(self) -> bool:
        """Whether the next proposals need the tokens of the step in flight: the next step is launched only
        once that one is read.
        """
        return bool(self.drafts_by) and self.costs.of_one < 1 and not self.acceptance.is_paused

    @property
    def method(self) -> str:
        """Where the newest proposals come from, for metrics."""
        return GRAMMAR if self.is_sure else self.guesser.method if self.guesser else self.drafts_by

    def num_worth(self, most: int) -> int:
        """How many guesses or drafts pay, at most `most`."""
        return self.acceptance.num_worth(min(most, self.most), self.costs.of_one)

    def take(self, drafted: Sequence[int], num_drafting: int) -> None:
        """Take the next proposals, of a draft for so many rows; none if there is no draft yet. A row that has
        none for long does not wait for steps in vain.
        """
        self.drafted, self.num_drafting = drafted, num_drafting
        self.num_unready = 0 if drafted else self.num_unready + 1
        if self.num_unready > MAX_UNREADY and self.acceptance.is_on_trial:
            self.num_unready, self.acceptance.pause = 0, FIRST_PAUSE

    def propose(self, most: int, skipped: int = 0) -> Sequence[int]:
        """Return at most `most` ids that follow the next `skipped` ones, which the step in flight samples;
        none if proposals do not pay.
        """
        if self.grammar:
            forced = self.grammar.forced(skipped + min(most, MAX_FORCED))[skipped:]
            self.is_sure = bool(forced) or not self.most
            if self.is_sure:
                return forced
        if self.guesser:
            count = self.num_worth(most)
            found: Sequence[int] = self.guesser.guess(skipped + count) if count else ()
        else:
            found, self.drafted = () if skipped else self.drafted[:most], ()
        if self.grammar and found:
            found = found[: self.grammar.num_allowed(found)]
        return found[skipped:]

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        """Take the tokens that a step with `num_proposed` proposals sampled: all but the last were
        proposed.
        """
        if not self.most:  # the grammar has taken them
            return
        (self.guesser or self.text).append(tokens)
        if self.kv_len is not None:  # that of wrong drafts does not count, and the newest token has none
            self.kv_len = min(self.kv_len, self.text.length - 1)
        cost = self.costs.of_drafted(self.num_drafting or self.costs.num_rows)
        self.acceptance.learn(len(tokens), 0 if self.is_sure else num_proposed, cost)


ProposerFactory = Callable[[Int32, GrammarMask | None], Proposer | None]
"""(ids of a row so far, its grammar) → its proposer."""


def guessing_factory(speculation: Speculation, costs: ProposalCosts | None = None) -> ProposerFactory:
    """What makes the proposers of rows for which no model proposes."""
    number, values = speculation.num_found, speculation.values
    budget, is_suffix = TrialBudget(), speculation.method == SUFFIX
    answers = RecentAnswers(int(values["suffix_decoding_max_cached_requests"])) if is_suffix else None

    def make(ids: Int32, grammar: GrammarMask | None) -> Proposer | None:
        if not number:
            return Proposer(ids, grammar) if grammar else None
        return Proposer(ids, grammar, number, Acceptance(budget=budget), costs, Guesser(ids, values, answers))

    return make
