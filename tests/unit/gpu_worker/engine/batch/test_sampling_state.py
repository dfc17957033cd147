"""What a row's next token depends on: counts, bans and top-p as if never interrupted; random numbers of
Philox-4x64, a function of seed, choice and index.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.request import SamplingParams
from gpu_worker.engine.batch.sampling_state import (
    SamplingState,
    philox_uniforms,
)
from tests.support.engine.start_rows import start_row


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.lists(st.integers(0, 200), max_size=200),
    st.integers(0, 200),
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=5),
)
def test_a_resumed_row_has_the_state_of_one_that_was_never_interrupted(
    prompt: list[int], tokens: list[int], base: int, words: list[list[int]]
) -> None:
    sampling = SamplingParams(
        frequency_penalty=0.5,
        presence_penalty=0.2,
        relative_frequency_penalty=0.7,
        temperature=1.0,
        top_p=0.9,
        top_p_decay=0.9,
        top_p_min=0.2,
        top_p_reset_ids=[5],
        bad_words=words,
    )
    start = start_row(0, [*prompt, *tokens[:base]], 999, len(tokens[:base]), sampling=sampling)
    resumed_start = start_row(0, [*prompt, *tokens], 999, len(tokens), sampling=sampling)
    uninterrupted, resumed = SamplingState.of(start, []), SamplingState.of(resumed_start, [])
    assert uninterrupted and resumed
    for token in tokens[base:]:
        uninterrupted.accept(token)
    assert (uninterrupted.tail, uninterrupted.banned_ids_at(5), uninterrupted.top_p) == (
        resumed.tail,
        resumed.banned_ids_at(5),
        resumed.top_p,
    )
    found = penalties_of(uninterrupted)
    assert found == penalties_of(resumed)
    for token, penalty in found.items():
        count, all_ids = tokens.count(token), [*prompt, *tokens]
        expected = 0.5 * count + 0.2 * (count > 0) + 0.7 * all_ids.count(token) / len(all_ids)
        assert penalty == pytest.approx(expected, rel=1e-5)


def penalties_of(state: SamplingState | None) -> dict[int, float]:
    assert state and state.token_counts
    return dict(zip(state.token_counts.ids.tolist(), state.penalty().tolist(), strict=True))


WORD = 2**64


def philox_4x64(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds of Philox-4x64, as in the paper (Salmon et al. 2011)."""
    first, second, third, fourth = counter
    for number in range(10):
        low_key = (key[0] + number * 0x9E3779B97F4A7C15) % WORD
        high_key = (key[1] + number * 0xBB67AE8584CAA73B) % WORD
        high, low = divmod(0xD2E7470EE14C6C93 * first, WORD)
        other_high, other_low = divmod(0xCA5A826395121157 * third, WORD)
        first, second, third, fourth = other_high ^ second ^ low_key, other_low, high ^ fourth ^ high_key, low
    return [first, second, third, fourth]


def test_the_reference_gives_the_known_answers_of_random123() -> None:
    assert philox_4x64([0] * 4, [0] * 2) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]
    assert philox_4x64([WORD - 1] * 4, [WORD - 1] * 2) == [
        0x87B092C3013FE90B,
        0x438C3C67BE8D0224,
        0x9CC7D7C69CD777B6,
        0xA09CAEBF594F0BA0,
    ]


def test_numbers_are_the_upper_53_bits_of_philox_4x64() -> None:
    """Four numbers for each value of the counter, which is 1 for the first block."""
    seed, choice = 2**63 + 11, 3
    words = [word for block in range(1, 17) for word in philox_4x64([block, 0, 0, 0], [seed, choice])]
    assert philox_uniforms(seed, choice, 0, 64).tolist() == [(word >> 11) / 2**53 for word in words]
