"""What is guessed from a row's own text and from recent answers, and how much of it, by what it costs and how
much was right.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from common.settings.speculation import read_speculation
from gpu_worker.engine.drafting.proposers import (
    FIRST_LOSS,
    FIRST_PAUSE,
    LOSS_SHARE,
    MIN_SUFFIX,
    TRIAL_PROPOSALS,
    Acceptance,
    Guesser,
    ProposalCosts,
    Proposer,
    RecentAnswers,
    proposer_factory,
)
from tests.support.engine.fixed_grammar import FixedGrammar

VALUES = read_speculation(0, '{"method": "suffix"}')


def guesser(ids: Sequence[int]) -> Guesser:
    return Guesser(np.array(ids, np.int32), VALUES)


@pytest.mark.parametrize(
    ("ids", "guessed"),
    [
        ([5], []),
        ([5, 6, 7], []),
        ([5, 6, 9, 5], []),  # one id is no match
        ([5, 6, 9, 8, 5, 6], [9, 8, 5, 6]),
        ([5, 6, 9, 8, 7, 4, 5, 6], [9, 8, 7, 4]),
        ([5, 6, 1, 5, 6, 2, 5, 6], [2, 5, 6, 2]),  # the newer of two
        ([4, 5, 6, 1, 3, 5, 6, 2, 4, 5, 6], [1, 3, 5, 6]),  # the longer of two
        ([7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 3, 1, 2, 3], [1, 2, 3, 1]),  # a repetition repeats itself
    ],
)
def test_what_followed_the_last_ids_before_is_guessed(ids: list[int], guessed: list[int]) -> None:
    assert guesser(ids).guess(4) == guessed
    assert guesser(ids).guess(2) == guessed[:2]


@pytest.mark.parametrize(
    ("ids", "guessed"),
    [
        ([5], []),
        ([5, 6, 7], []),
        ([5, 6, 9, 8, 5, 6], [9, 8]),  # as long as the match
        ([5, 6, 1, 8, 5, 6, 2, 9, 5, 6, 1, 3, 5, 6], [1, 3]),  # what followed more often
        ([4, 5, 6, 1, 3, 5, 6, 2, 5, 6, 2, 4, 5, 6], [1, 3, 5]),  # the longest match
        ([7, 7, 7, 7], [7, 7, 7]),
    ],
)
def test_what_followed_most_often_is_guessed(ids: list[int], guessed: list[int]) -> None:
    assert Guesser(np.array(ids, np.int32), VALUES, RecentAnswers(100)).guess(9) == guessed


def expected_matches(answers: dict[int, list[int]], tail: list[int]) -> tuple[set[tuple[int, int]], int]:
    found = {
        (number, place): next(
            (n for n in range(place, 0, -1) if tail[-n:] == ids[place - n : place] and n <= len(tail)), 0
        )
        for number, ids in answers.items()
        for place in range(1, len(ids) + 1)
    }
    longest = max(found.values(), default=0)
    longest = longest if longest >= MIN_SUFFIX else 0
    return {place for place, length in found.items() if length == longest and longest}, longest


def test_matches_are_the_longest_whatever_was_dropped() -> None:
    draw = random.Random(2)
    for _ in range(100):
        answers = RecentAnswers(max_answers=3, max_tokens=30)
        kept: dict[int, list[int]] = {}
        for _ in range(draw.randrange(1, 6)):
            number, ids = answers.begin(), [draw.randrange(3) for _ in range(draw.randrange(1, 15))]
            kept[number] = ids
            answers.append(number, ids)
            while len(kept) > 3 or sum(map(len, kept.values())) > 30:
                del kept[next(iter(kept))]
        assert answers.answers == kept
        tail = [draw.randrange(3) for _ in range(6)]
        places, longest = answers.matches(tail, own=0)
        numbers = {id(ids): number for number, ids in answers.answers.items()}
        found = {(numbers[id(ids)], place) for ids, place in places}
        assert (found, longest) == expected_matches(kept, tail)
        assert sum(map(len, answers.places.values())) == sum(max(0, len(ids) - 1) for ids in kept.values())


IDS = np.array([5, 6, 9, 8, 7, 4, 5, 6], np.int32)


@dataclass
class Forcing(FixedGrammar):
    """Forces some tokens, and allows some."""

    forces: list[int] = field(default_factory=list)
    allows: int = 0

    def forced(self, most: int) -> list[int]:
        return self.forces[:most]

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return min(len(tokens), self.allows)


def test_a_grammar_forces_tokens_or_cuts_guesses() -> None:
    grammar = Forcing(forces=[1, 2], allows=2)
    proposer = Proposer(IDS, grammar, 3, guesser=guesser(IDS.tolist()))
    assert (proposer.propose(9), proposer.is_sure, proposer.method) == ([1, 2], True, "grammar")
    grammar.forces = []
    assert (proposer.propose(9), proposer.is_sure, proposer.method) == ([9, 8], False, "ngram")
    grammar.allows = 0
    assert proposer.propose(9) == []


def test_what_proposes_is_what_the_settings_say() -> None:
    grammar = Forcing()
    none = proposer_factory(read_speculation(0, None))
    assert none(IDS, None) is None
    assert (forced := none(IDS, grammar)) and forced.is_sure and forced.method == "grammar"
    for config, method in ((None, "ngram"), ('{"method": "suffix"}', "suffix")):
        proposer = proposer_factory(read_speculation(3, config))(IDS, grammar)
        assert proposer and proposer.method == method and not proposer.is_sure


MOST = 4
CHEAP = 0.15


def test_proposals_that_are_wrong_are_not_tried_for_a_while_and_then_again() -> None:
    acceptance, pauses = Acceptance(costs=ProposalCosts(token_ms=CHEAP)), []
    for _ in range(3):
        tried = 0
        while count := acceptance.num_worth(MOST):
            acceptance.learn(1, count)
            tried += count
        assert TRIAL_PROPOSALS <= tried < TRIAL_PROPOSALS + 8  # earlier ones count less
        acceptance.costs.left, acceptance.costs.is_open, paused = FIRST_LOSS, True, 0
        while not acceptance.num_worth(MOST):
            acceptance.learn(1, 0)
            paused += 1
        pauses.append(paused)
    assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]


@pytest.mark.parametrize("cost", [0.1, 0.4, 0.9])
def test_wrong_proposals_of_all_rows_lose_a_small_share(cost: float) -> None:
    """Whatever one costs, and if new rows come all the time; trials go on for ever."""
    num_rows, costs = 8, ProposalCosts(token_ms=cost)
    num_tokens, lost, late = 0, 0.0, 0
    for step in range(4000):
        if step % 100 == 0:
            rows = [Acceptance(costs=costs) for _ in range(num_rows)]
        counts = [row.num_worth(MOST) for row in rows]
        for row, count in zip(rows, counts, strict=True):
            row.learn(1, count)
        num_tokens, lost = num_tokens + num_rows, lost + cost * sum(counts)
        late += sum(counts) * (step > 3000)
        assert lost < FIRST_LOSS + LOSS_SHARE * num_tokens + num_rows * MOST * cost
    assert late, "what was wrong once is tried again"
