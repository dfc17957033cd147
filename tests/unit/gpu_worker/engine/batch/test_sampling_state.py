"""Sampling states: bans, top-p decay and penalties of a row's next token."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.request import SamplingParams
from gpu_worker.engine.batch.sampling_state import SamplingState
from tests.support.engine.start_rows import start_row

PROMPT = [1, 2, 3]


def state_of(
    sampling: SamplingParams, generated: Sequence[int] = (), end_ids: Sequence[int] = (), **params: Any
) -> SamplingState:
    start = start_row(0, [*PROMPT, *generated], 999, len(generated), sampling=sampling, **params)
    state = SamplingState.of(start, list(end_ids))
    assert state
    return state


def test_a_plainly_greedy_row_has_no_state() -> None:
    assert SamplingState.of(start_row(0, PROMPT, 999), [8]) is None
    assert SamplingState.of(start_row(0, [*PROMPT, 4], 999, 1, min_new_tokens=1), [8]) is None


def test_a_bad_word_bans_its_last_id_where_the_rest_precedes() -> None:
    """Words may begin in the prompt."""
    state = state_of(SamplingParams(bad_words=[[11], [3, 12], [2, 3, 4, 13]]))
    assert state.banned_ids_at(0) == [11, 12]
    state.accept(4)
    assert state.banned_ids_at(1) == [11, 13]
    state.accept(3)
    assert state.banned_ids_at(2) == [11, 12]


def test_end_ids_are_banned_before_min_new_tokens() -> None:
    state = state_of(SamplingParams(), end_ids=[8, 9], min_new_tokens=2)
    assert [state.banned_ids_at(index) for index in range(4)] == [[8, 9], [8, 9], [], []]
    assert [state.applies_at(index) for index in range(4)] == [True, True, False, False]


def test_a_row_that_samples_applies_beyond_min_new_tokens() -> None:
    state = state_of(SamplingParams(temperature=1.0), end_ids=[8], min_new_tokens=1)
    assert [state.applies_at(index) for index in range(3)] == [True, True, True]


def test_top_p_decays_to_its_minimum_until_it_is_reset() -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.8, top_p_decay=0.5, top_p_min=0.3, top_p_reset_ids=[5])
    state = state_of(sampling)
    top_ps = [state.top_p]
    for token in (6, 6, 6, 5, 6):
        state.accept(token)
        top_ps.append(state.top_p)
    assert top_ps == pytest.approx([0.8, 0.4, 0.3, 0.3, 0.8, 0.4])


def test_top_p_without_decay_is_constant() -> None:
    state = state_of(SamplingParams(temperature=1.0, top_p=0.8))
    state.accept(6)
    assert state.top_p == 0.8


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
