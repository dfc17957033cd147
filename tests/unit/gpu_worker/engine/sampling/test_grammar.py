"""Grammar masks and biases, beside rows without them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from common.messages.request import SamplingParams
from tests.support.engine.sample_requests import (
    VOCABULARY,
    check_row,
    logits_of,
    request,
    sample,
)

pytestmark = pytest.mark.usefixtures("each_sampler")


class FixedGrammar:
    """A grammar with the same mask and bias for every token; it records the tokens that it accepts."""

    def __init__(self, allowed: Sequence[int] | None = None, biased: dict[int, float] | None = None) -> None:
        self.allowed = allowed
        self.biased = biased

    def is_ready(self) -> bool:
        return True

    def must_end(self) -> bool:
        return False

    def accept(self, token: int) -> bool:
        return True

    def mask(self) -> Any:
        if self.allowed is None:
            return None
        bits = np.zeros(-(-VOCABULARY // 32) * 32, np.uint8)
        bits[list(self.allowed)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def bias(self) -> Any:
        return (
            None
            if self.biased is None
            else np.array([self.biased.get(token, 0) for token in range(VOCABULARY)], np.float32)
        )


def test_mask_and_bias_apply_to_their_row_alone() -> None:
    """They come before truncation, as logit biases and banned ids do."""
    logits = logits_of(6, 5)
    top_p = SamplingParams(temperature=1.0, top_p=0.9, seed=1)
    params = [top_p, top_p, top_p, None, top_p]  # row 3 is greedy but for its grammar
    grammars = [
        None,
        FixedGrammar(allowed=[3, 31, 32, 59]),
        FixedGrammar(biased={7: 5.0}),
        FixedGrammar(allowed=[4]),
        FixedGrammar([9, 10, 11], {10: 3.0}),
    ]
    sampled = sample(
        logits,
        [
            request(sampling, VOCABULARY, grammar=grammar)
            for sampling, grammar in zip(params, grammars, strict=True)
        ],
    )
    for row, grammar in enumerate(grammars):
        biased_logits = logits[row].clone()
        if grammar and grammar.biased:
            biased_logits += torch.from_numpy(grammar.bias())
        allowed = grammar.allowed if grammar and grammar.allowed else range(VOCABULARY)
        banned = sorted(set(range(VOCABULARY)) - set(allowed))
        check_row(sampled, row, biased_logits, params[row] or SamplingParams(), banned)
    assert sampled.ids[3] == 4
