"""What a row's next token depends on: counts, bans and top-p as if never interrupted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.request import SamplingParams
from gpu_worker.engine.batch.sampling_state import SamplingState
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
