"""Philox: the random numbers of a row."""

import numpy as np
from scipy.stats import chisquare

from gpu_worker.engine.batch.philox import BUFFERED, PhiloxStream, philox_uniforms

PINNED = [0.8824668302545412, 0.3690383346754841, 0.5170696944527113]


def test_tokens_of_a_row_are_independent() -> None:
    """Pairs of one token and the next, of a seed and the next, of a choice and the next."""
    numbers = np.array([[philox_uniforms(seed, choice, 0, 4096) for choice in range(2)] for seed in range(2)])
    for one, other in (
        (numbers[..., :-1], numbers[..., 1:]),
        (numbers[0], numbers[1]),
        (numbers[:, 0], numbers[:, 1]),
    ):
        pairs = np.histogram2d(one.ravel(), other.ravel(), bins=8, range=[[0, 1], [0, 1]])[0]
        assert chisquare(pairs.ravel()).pvalue > 1e-3


def test_numbers_are_a_function_of_seed_choice_and_index() -> None:
    """Pinned: another library, machine or version must not change what a seed means."""
    assert philox_uniforms(7, 1, 0, 3).tolist() == PINNED
    assert philox_uniforms(7, 1, 64, 8).tolist() == philox_uniforms(7, 1, 0, 128)[64:72].tolist()
    for begin in (0, 1, BUFFERED - 1, BUFFERED, 1000):
        row = PhiloxStream(7, 1)
        assert [row.at(index) for index in range(begin, begin + 200)] == philox_uniforms(7, 1, 0, 1200)[
            begin : begin + 200
        ].tolist()
    assert PhiloxStream(2**64 - 1, 0).at(5) == PhiloxStream(-1, 0).at(5) != PhiloxStream(0, 0).at(5)
