"""Grammar masks and biases, beside rows without them."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from common.messages.request import SamplingParams
from tests.support.engine.fixed_grammar import FixedGrammar
from tests.support.engine.sample_requests import (
    VOCABULARY,
    check_row,
    logits_of,
    request,
    sample,
)

pytestmark = pytest.mark.usefixtures("each_sampler")


def fixed(allowed: Sequence[int] | None, biased: dict[int, float] | None) -> FixedGrammar:
    bits = np.zeros(-(-VOCABULARY // 32) * 32, np.uint8)
    bits[list(allowed or [])] = 1
    words = np.packbits(bits, bitorder="little").view(np.int32)
    biases = np.array([(biased or {}).get(token, 0) for token in range(VOCABULARY)], np.float32)
    return FixedGrammar(None if allowed is None else words, None if biased is None else biases)


def test_mask_and_bias_apply_to_their_row_alone() -> None:
    """They come before truncation, as logit biases and banned ids do."""
    logits = logits_of(6, 5)
    top_p = SamplingParams(temperature=1.0, top_p=0.9, seed=1)
    params = [top_p, top_p, top_p, None, top_p]  # row 3 is greedy but for its grammar
    allowed = [None, [3, 31, 32, 59], None, [4], [9, 10, 11]]
    biased = [None, None, {7: 5.0}, None, {10: 3.0}]
    grammars = [None, *map(fixed, allowed[1:], biased[1:])]
    sampled = sample(
        logits,
        [
            request(sampling, VOCABULARY, grammar=grammar)
            for sampling, grammar in zip(params, grammars, strict=True)
        ],
    )
    for row, grammar in enumerate(grammars):
        biased_logits = logits[row].clone()
        if grammar and biased[row]:
            biased_logits += torch.from_numpy(grammar.bias())
        banned = sorted(set(range(VOCABULARY)) - set(allowed[row] or range(VOCABULARY)))
        check_row(sampled, row, biased_logits, params[row] or SamplingParams(), banned)
    assert sampled.ids[3] == 4
