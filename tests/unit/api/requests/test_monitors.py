"""Whether a batcher works is decided by changes of its heartbeat and this gateway's own clock."""

from typing import Any

import pytest

from api.requests import monitors
from api.requests.monitors import SILENT_S, BatcherMonitor
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.settings.settings import Settings

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


def test_without_a_heartbeat_nobody_works(clock: Clock) -> None:
    monitor = new_monitor()
    assert not monitor.works and monitor.describe() == "no batcher is active yet"
    monitor.update("b0-1", None, 0.0)
    assert not monitor.works and monitor.active == ""


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
