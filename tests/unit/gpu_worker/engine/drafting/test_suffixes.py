"""Suffix decoding: what is guessed from a row's own text, and from the worker's recent answers."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from common.settings.speculation import read_speculation
from gpu_worker.engine.drafting.proposers import MIN_MATCH, RecentAnswers, SuffixGuesser, most_frequent

VALUES = read_speculation(0, '{"method": "suffix"}').values


def guesser(ids: Sequence[int], answers: RecentAnswers | None = None, **values: Any) -> SuffixGuesser:
    return SuffixGuesser(np.array(ids, np.int32), answers or RecentAnswers(100), {**VALUES, **values})


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
    assert guesser(ids).guess(9) == guessed


def test_a_guess_is_as_long_as_its_match_times_a_factor() -> None:
    ids = [5, 6, 9, 8, 7, 4, 3, 5, 6]
    assert guesser(ids, suffix_decoding_max_spec_factor=2.0).guess(9) == [9, 8, 7, 4]
    assert guesser(ids, suffix_decoding_max_spec_factor=2.0).guess(3) == [9, 8, 7]


def test_a_guess_ends_where_it_becomes_unlikely() -> None:
    places = [([1, 2, 3], 0), ([1, 2, 4], 0), ([1, 5, 6], 0), ([7, 8, 9], 0)]
    assert most_frequent(places, 9, 0.3) == ([1, 2], 3 / 4 + 2 / 4)
    assert most_frequent(places, 9, 0.6) == ([1], 3 / 4)
    assert most_frequent(places, 9, 0.8) == ([], 0)


def test_answers_of_other_rows_are_found() -> None:
    answers = RecentAnswers(100)
    first = guesser([1, 2], answers)
    first.append([20, 21, 22, 23, 24])
    other = guesser([9, 20, 21, 22], answers)
    assert other.guess(9) == [23, 24]
    assert guesser([9, 20, 21, 22], RecentAnswers(0)).guess(9) == []
    first.append([25])  # it still runs
    assert other.guess(9) == [23, 24, 25]


def test_the_text_with_more_to_expect_is_chosen() -> None:
    answers = RecentAnswers(100)
    guesser([1], answers).append([3, 4, 5, 6, 7, 8])
    ids = [5, 6, 1, 1, 3, 4, 5, 6]  # its own match has two ids, the other's four
    assert guesser(ids, answers).guess(9) == [7, 8]
    assert guesser([3, 4, 5, 6, 1, 1, 3, 4, 5, 6], answers).guess(9) == [1, 1, 3, 4]


def expected_matches(answers: dict[int, list[int]], tail: list[int]) -> tuple[set[tuple[int, int]], int]:
    found = {
        (number, place): next(
            (n for n in range(place, 0, -1) if tail[-n:] == ids[place - n : place] and n <= len(tail)), 0
        )
        for number, ids in answers.items()
        for place in range(1, len(ids) + 1)
    }
    longest = max(found.values(), default=0)
    longest = longest if longest >= MIN_MATCH else 0
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


def test_memory_is_bounded() -> None:
    answers = RecentAnswers(max_answers=10_000, max_tokens=1000)
    draw = random.Random(3)
    for _ in range(40):
        found = guesser([1], answers)
        found.append([draw.randrange(50) for _ in range(90)])
    assert answers.num_tokens <= 1000 >= sum(map(len, answers.places.values()))
    found.append([1, 2] * 600)  # one answer longer than all that is kept
    assert answers.num_tokens <= 1000 and not set(map(len, answers.answers.values())) & {1200}
