"""Records: what is packed for each token is what comes out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.events import Tokens, pack_tokens
from common.messages.records import (
    RECORD,
    pack_floats,
    pack_ids,
    pack_records,
    unpack_columns,
    unpack_records,
)


def columns(num_tokens: int, num_top: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Packed ids, log-probabilities, and those of the likeliest tokens; all different."""
    num = num_tokens * num_top
    return (
        pack_ids(range(num_tokens)),
        pack_floats([-float(i) for i in range(num_tokens)]),
        pack_ids(range(1000, 1000 + num)),
        pack_floats([-1000.0 - i for i in range(num)]),
    )


def test_records_are_a_token_and_its_likeliest_in_order() -> None:
    top_ids, top_logprobs = pack_ids([7, 8, 9, 10]), pack_floats([-1.0, -2.0, -3.0, -4.0])
    packed = pack_records(pack_ids([1, 2]), pack_floats([-0.5, -0.25]), top_ids, top_logprobs)
    pairs = [(1, -0.5), (7, -1.0), (8, -2.0), (2, -0.25), (9, -3.0), (10, -4.0)]
    assert packed == b"".join(RECORD.pack(*pair) for pair in pairs)
    likeliest = [[(7, -1.0), (8, -2.0)], [(9, -3.0), (10, -4.0)]]
    assert unpack_records(packed, 3) == ([1, 2], [-0.5, -0.25], likeliest)


def test_without_likeliest_tokens_there_are_none() -> None:
    packed = pack_records(*columns(2, 0))
    assert unpack_records(packed) == ([0, 1], [0.0, -1.0], [])


def test_tokens_pack_as_their_columns() -> None:
    ids, logprobs, top_ids, top_logprobs = columns(3, 2)
    tokens = Tokens("r", 1, 0, ids, logprobs, top_ids=top_ids, top_logprobs=top_logprobs)
    assert pack_tokens(tokens) == pack_records(ids, logprobs, top_ids, top_logprobs)


@pytest.mark.parametrize("num_top", [0, 1, 3])
@given(num_tokens=st.integers(1, 5), skipped=st.integers(0, 4))
def test_columns_come_back_from_any_token_on(num_top: int, num_tokens: int, skipped: int) -> None:
    ids, logprobs, top_ids, top_logprobs = columns(num_tokens, num_top)
    first = min(skipped, num_tokens - 1)
    width = 1 + num_top
    packed = bytearray(pack_records(ids, logprobs, top_ids, top_logprobs))
    assert unpack_columns(packed, first * width * RECORD.size, width) == (
        ids[4 * first :],
        logprobs[4 * first :],
        top_ids[4 * first * num_top :],
        top_logprobs[4 * first * num_top :],
    )
