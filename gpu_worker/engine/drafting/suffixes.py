"""Suffix decoding (arXiv:2411.04975): what a row writes next is found in its own ids and in the worker's
recent answers, by the longest suffix that occurs there. How often a token followed says how far a guess goes.

An index of pairs of ids finds the same places as a suffix tree, with less memory and constant work a token.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.drafting.ngrams import RowIds

MAX_TOKENS = 2**17
"""Tokens of recent answers that are kept, at most; each takes about 150 bytes."""
MAX_PLACES = 64
"""Places of one pair of ids that are kept, and occurrences that are compared: the newest."""
MIN_MATCH = 2

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
        if len(tail) < MIN_MATCH:
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


class SuffixGuesser:
    """Guesses what followed most often after the row's last ids: in its own text, or in recent answers, where
    more is expected to be right. A guess is as long as the match, times `suffix_decoding_max_spec_factor`.
    """

    method = "suffix"

    def __init__(self, ids: Int32, answers: RecentAnswers, values: Mapping[str, float]) -> None:
        self.text = RowIds(ids)
        self.answers = answers
        self.number = answers.begin()
        self.max_match = int(values["suffix_decoding_max_tree_depth"])
        self.factor = values["suffix_decoding_max_spec_factor"]
        self.min_prob = values["suffix_decoding_min_token_prob"]

    def guess(self, count: int) -> list[int]:
        known = self.text.known[: self.text.length]
        own, own_length = self.text.matches(MIN_MATCH, self.max_match)
        others, length = self.answers.matches(known[-self.max_match :].tolist(), self.number)
        places = [(known, place) for place in reversed(own[-MAX_PLACES:])]
        found = most_frequent(places, min(count, self.longest(own_length)), self.min_prob, repeats=True)
        other = most_frequent(others, min(count, self.longest(length)), self.min_prob)
        return found[0] if (found[1], own_length) >= (other[1], length) else other[0]

    def longest(self, match_length: int) -> int:
        """How long a guess may be after a match of so many ids."""
        return int(self.factor * match_length)

    def append(self, tokens: Sequence[int]) -> None:
        self.text.append(tokens)
        self.answers.append(self.number, tokens)
