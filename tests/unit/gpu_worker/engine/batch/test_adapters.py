"""Adapters take turns in the steps; tokens of one adapter are put together."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engine.batch.adapters import TURN_STEPS, AdaptedTokens, Adapter, AdapterTurns

FOUR = [Adapter(name) for name in "abcd"]


def test_adapters_that_fit_are_all_chosen_in_every_step() -> None:
    turns = AdapterTurns(4)
    assert all(turns.choose([*FOUR, FOUR[0]]) == set(FOUR) for _ in range(3 * TURN_STEPS))


def test_one_that_waits_takes_the_place_of_one_whose_rows_have_ended_at_once() -> None:
    turns = AdapterTurns(2)
    assert turns.choose(FOUR[:3]) == set(FOUR[:2])
    assert turns.choose(FOUR[1:3]) == set(FOUR[1:3])


@given(st.integers(1, 3), st.integers(2, 4))
def test_each_adapter_comes_to_its_turn_and_keeps_it_for_a_while(most: int, wanted: int) -> None:
    turns = AdapterTurns(most)
    steps = [turns.choose(FOUR[:wanted]) for _ in range(8 * TURN_STEPS)]
    assert {len(step) for step in steps} == {min(most, wanted)}
    for adapter in FOUR[:wanted]:
        places = [place for place, step in enumerate(steps) if adapter in step]
        assert len(places) >= TURN_STEPS
        assert max(np.diff(places), default=1) <= wanted * TURN_STEPS + 1


@given(st.lists(st.integers(-1, 3), max_size=20))
def test_tokens_are_grouped_by_the_slots_of_their_adapters(slots: list[int]) -> None:
    tokens = AdaptedTokens.of(np.array(slots, np.int32))
    found = {slot: tokens.order[first:end].tolist() for slot, first, end in tokens.groups}
    assert found == {
        slot: [place for place, own in enumerate(slots) if own == slot] for slot in {*slots} - {-1}
    }
