"""What a gateway knows of pools and their batchers, and which pools a request tries."""

import random
from collections import Counter
from typing import Any

import pytest

from api.requests import monitors
from api.requests.monitors import SILENT_S, BatcherMonitor
from api.requests.pool import merge, pick_by_depth, rank_by_weight
from common.broker.directory import TTL_S, KnownPool, PoolEntry
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.settings.settings import Settings

# --- pool choice --------------------------------------------------------------------------------------------

KEYS = [f"request {number}" for number in range(4000)]


def firsts(weights: dict[str, float]) -> dict[str, str]:
    return {key: rank_by_weight(weights, key)[0] for key in KEYS}


def test_two_pools_are_picked_at_random_and_the_shorter_queue_comes_first() -> None:
    depths = {"a": 0.1, "b": 0.5, "c": 2.0}
    picks = [tuple(pick_by_depth(depths, random.Random(seed))) for seed in range(300)]
    assert {*picks} == {("a", "b"), ("a", "c"), ("b", "c")}
    assert min(Counter(picks).values()) > 60


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_a_pool_gets_the_share_of_its_weight(share: float) -> None:
    counts = Counter(firsts({"a": 100 - 100 * share, "b": 100 * share}).values())
    assert counts["b"] / len(KEYS) == pytest.approx(share, abs=0.02)


def test_a_request_goes_the_same_way_each_time_and_weights_are_relative() -> None:
    assert firsts({"a": 9, "b": 1}) == firsts({"b": 10, "a": 90})


# --- directory ----------------------------------------------------------------------------------------------

OLD, NEW = PoolEntry("redis://a", num_ready=1), PoolEntry("redis://a", num_ready=2)


def test_a_pool_that_a_new_directory_lacks_is_known_until_it_is_silent_for_too_long() -> None:
    known = merge({"a": KnownPool(OLD, 0.2)}, {}, 0.5)
    assert known == {"a": KnownPool(OLD, 0.7)} and known["a"].is_live
    assert not merge(known, {}, 10)["a"].is_live
    assert merge(known, {}, TTL_S) == {}


# --- monitors -----------------------------------------------------------------------------------------------

HOUR_MS = 3_600_000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(monitors, "time", clock)
    return clock


def new_monitor() -> BatcherMonitor:
    redis: Any = None
    return BatcherMonitor(PoolClient(redis, Keys("default")), Settings())


def test_a_heartbeat_counts_from_its_own_time(clock: Clock) -> None:
    monitor = new_monitor()
    monitor.update("b0-1", 1000.0, 1000.0 + 1000 * SILENT_S - 500)
    assert monitor.active == "b0-1"
    clock.now_s += 1.0
    assert not monitor.works and monitor.describe().startswith("the active batcher b0-1 hangs")


def test_an_unchanged_heartbeat_proves_nothing(clock: Clock) -> None:
    monitor = new_monitor()
    for _ in range(10):
        monitor.update("b0-1", 1000.0, 1000.0)
        clock.now_s += 1.0
    assert not monitor.works
    monitor.update("b0-1", 1500.0, 1500.0)
    assert monitor.active == "b0-1"


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS])
def test_a_jump_of_the_broker_s_clock_changes_nothing(clock: Clock, jump_ms: float) -> None:
    monitor = new_monitor()
    monitor.update("b0-1", 2 * HOUR_MS, 2 * HOUR_MS)
    clock.now_s += 1.0
    monitor.update("b0-1", 2 * HOUR_MS + 500, 2 * HOUR_MS + 1000 + jump_ms)
    assert monitor.active == "b0-1"
    clock.now_s += SILENT_S + 1.0
    monitor.update("b0-1", 2 * HOUR_MS + 500, 2 * HOUR_MS + 1000 + jump_ms)
    assert not monitor.works, "a heartbeat that seems to come from the future grows old, too"


def test_between_two_holders_the_last_heartbeat_counts(clock: Clock) -> None:
    monitor = new_monitor()
    monitor.update("b0-1", 1000.0, 1000.0)
    clock.now_s += SILENT_S - 1
    monitor.update("", None, 4000.0)
    assert monitor.works and monitor.active == ""
    monitor.update("b1-1", 4500.0, 4500.0)
    clock.now_s += SILENT_S - 1
    assert monitor.active == "b1-1"
