"""Prompt look-up: what is guessed."""

import random

import numpy as np
import pytest

from gpu_worker.engine.drafting.proposers import MAX_MATCH, MIN_MATCH, NgramGuesser


def guesser(ids: list[int]) -> NgramGuesser:
    return NgramGuesser(np.array(ids, np.int32))


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


def expected_place(ids: list[int]) -> list[int]:
    """Where the longest, newest match ends, by trying all."""
    for length in range(min(MAX_MATCH, len(ids) - 1), MIN_MATCH - 1, -1):
        for place in range(len(ids) - 1, length - 1, -1):
            if ids[place - length : place] == ids[-length:]:
                return [place]
    return []


def test_the_match_is_the_longest_and_of_these_the_newest() -> None:
    draw = random.Random(1)
    for _ in range(500):
        ids = [draw.randrange(3) for _ in range(draw.randrange(1, 40))]
        places, _ = guesser(ids).text.matches(MIN_MATCH, MAX_MATCH)
        assert places[-1:] == expected_place(ids)


def test_how_many_ids_are_looked_up_is_a_choice() -> None:
    ids = np.array([5, 6, 9, 1, 6, 2, 8, 5, 6], np.int32)
    assert NgramGuesser(ids, 1, 1).guess(1) == [2]
    assert NgramGuesser(ids, 2, 8).guess(1) == [9]
    assert NgramGuesser(ids, 3, 8).guess(1) == []


def test_ids_that_were_sampled_are_looked_up_too() -> None:
    found = guesser([1, 2])
    for token in range(3, 200):
        found.append([token])
    found.append([1, 2])
    assert found.guess(2) == [3, 4]
    found.append([3, 4, 9])
    found.append([3, 4])
    assert found.guess(2) == [9, 3]
