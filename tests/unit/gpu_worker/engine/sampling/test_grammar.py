"""Masks of grammars and of allowed ids, beside rows without them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

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


def fixed(allowed: Sequence[int]) -> FixedGrammar:
    bits = np.zeros(-(-VOCABULARY // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return FixedGrammar(np.packbits(bits, bitorder="little").view(np.int32))


def test_a_mask_applies_to_its_row_alone() -> None:
    """It comes before truncation, as logit biases and banned ids do; an id outside the vocabulary is none."""
    logits = logits_of(6, 5)
    top_p = SamplingParams(temperature=1.0, top_p=0.9, seed=1)
    listed = replace(top_p, allowed_token_ids=[9, 10, 59, 10**6])
    params = [top_p, top_p, listed, None, top_p]  # row 3 is greedy but for its grammar
    allowed = [None, [3, 31, 32, 59], None, [4], [9, 10, 11]]
    sampled = sample(
        logits,
        [
            request(sampling, VOCABULARY, grammar=fixed(ids) if ids else None)
            for sampling, ids in zip(params, allowed, strict=True)
        ],
    )
    for row, ids in enumerate(allowed):
        banned = sorted(set(range(VOCABULARY)) - set(ids or range(VOCABULARY)))
        check_row(sampled, row, logits[row], params[row] or SamplingParams(), banned)
    assert sampled.ids[2] in (9, 10, 59)
    assert sampled.ids[3] == 4
