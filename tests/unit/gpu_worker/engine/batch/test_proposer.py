"""Prompt look-up: what is proposed, and when it is not tried any more."""

import random

import numpy as np
import pytest

from gpu_worker.engine.batch.proposer import (
    FIRST_PAUSE,
    LEAST_RIGHT_SHARE,
    MAX_MATCH,
    MIN_MATCH,
    TRIAL_PROPOSALS,
    NgramProposer,
)


def proposer(ids: list[int], num_speculated: int = 4) -> NgramProposer:
    return NgramProposer(num_speculated, np.array(ids, np.int32))


@pytest.mark.parametrize(
    ("ids", "proposed"),
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
def test_what_followed_the_last_ids_before_is_proposed(ids: list[int], proposed: list[int]) -> None:
    assert proposer(ids).propose(99) == proposed
    assert proposer(ids).propose(2) == proposed[:2]


def expected_place(ids: list[int]) -> int | None:
    """Where the longest, newest match ends, by trying all."""
    for length in range(min(MAX_MATCH, len(ids) - 1), MIN_MATCH - 1, -1):
        for place in range(len(ids) - 1, length - 1, -1):
            if ids[place - length : place] == ids[-length:]:
                return place
    return None


def test_the_match_is_the_longest_and_of_these_the_newest() -> None:
    draw = random.Random(1)
    for _ in range(500):
        ids = [draw.randrange(3) for _ in range(draw.randrange(1, 40))]
        assert proposer(ids).find() == expected_place(ids)


def test_ids_that_were_learnt_are_looked_up_too() -> None:
    speculating = proposer([1, 2], 2)
    for token in range(3, 200):
        speculating.learn([token], 0)
    speculating.learn([1, 2], 0)
    assert speculating.propose(2) == [3, 4]
    speculating.learn([3, 4, 9], 2)
    speculating.learn([3, 4], 0)
    assert speculating.propose(2) == [9, 3]


def test_proposals_that_are_wrong_are_not_tried_for_a_while_and_then_again() -> None:
    speculating, pauses = proposer([7] * 9), []
    for _ in range(3):
        tried = 0
        while speculating.propose(99):
            speculating.learn([7], 4)
            tried += 4
        assert TRIAL_PROPOSALS <= tried < TRIAL_PROPOSALS + 8  # earlier ones count less
        paused = 0
        while not speculating.propose(99):
            speculating.learn([7], 0)
            paused += 1
        pauses.append(paused)
    assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]


def test_proposals_that_are_mostly_right_are_never_paused() -> None:
    speculating = proposer([7] * 9)
    for step in range(200):
        assert speculating.propose(99)
        speculating.learn([7] * (1 + (step % 10 < 10 * LEAST_RIGHT_SHARE + 2) * 4), 4)
