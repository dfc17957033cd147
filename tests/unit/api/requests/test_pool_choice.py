"""Which pools a request tries, and in which order."""

import random
from collections import Counter

import pytest

from api.requests.pool_choice import pick_by_depth, rank_by_weight

KEYS = [f"request {number}" for number in range(4000)]


def firsts(weights: dict[str, float]) -> dict[str, str]:
    return {key: rank_by_weight(weights, key)[0] for key in KEYS}


def test_two_pools_are_picked_at_random_and_the_shorter_queue_comes_first() -> None:
    depths = {"a": 0.1, "b": 0.5, "c": 2.0}
    picks = [tuple(pick_by_depth(depths, random.Random(seed))) for seed in range(300)]
    assert {*picks} == {("a", "b"), ("a", "c"), ("b", "c")}
    assert min(Counter(picks).values()) > 60


def test_equal_queues_take_turns_by_chance() -> None:
    chance = random.Random(1)
    picks = Counter(pick_by_depth({"a": 0.0, "b": 0.0}, chance)[0] for _ in range(400))
    assert min(picks.values()) > 150


def test_one_pool_is_picked_alone() -> None:
    assert pick_by_depth({"a": 3.0}, random.Random(1)) == ["a"]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_a_pool_gets_the_share_of_its_weight(share: float) -> None:
    counts = Counter(firsts({"a": 100 - 100 * share, "b": 100 * share}).values())
    assert counts["b"] / len(KEYS) == pytest.approx(share, abs=0.02)


def test_a_request_goes_the_same_way_each_time_and_weights_are_relative() -> None:
    assert firsts({"a": 9, "b": 1}) == firsts({"b": 10, "a": 90})


def test_a_shift_moves_requests_to_the_pool_that_grows_only() -> None:
    before, after = firsts({"a": 9, "b": 1}), firsts({"a": 5, "b": 5})
    assert {(before[key], after[key]) for key in KEYS if before[key] != after[key]} == {("a", "b")}


def test_without_a_pool_only_its_requests_move() -> None:
    before, after = firsts({"a": 1, "b": 1, "c": 1}), firsts({"a": 1, "b": 1})
    assert all(before[key] == after[key] for key in KEYS if before[key] != "c")
    assert Counter(after[key] for key in KEYS if before[key] == "c").keys() == {"a", "b"}


def test_a_pool_without_weight_gets_nothing() -> None:
    assert rank_by_weight({"a": 0.0, "b": 1.0}, "any") == ["b"]
