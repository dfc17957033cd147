"""The watchdog alone, with a clock that is set."""

import pytest

from gpu_worker.agent.watchdog import EngineStuck, Watchdog


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_no_step_for_longer_than_the_timeout_raises(clock: list[float]) -> None:
    watchdog = Watchdog(lambda: 60.0, lambda: True)
    clock[0] += 60
    watchdog.check()
    clock[0] += 1
    with pytest.raises(EngineStuck, match="no step for 61 s"):
        watchdog.check()


def test_a_step_resets_the_time(clock: list[float]) -> None:
    watchdog = Watchdog(lambda: 60.0, lambda: True)
    clock[0] += 59
    watchdog.reset()
    clock[0] += 59
    watchdog.check()


def test_an_engine_without_work_is_never_stuck(clock: list[float]) -> None:
    watchdog = Watchdog(lambda: 60.0, lambda: False)
    clock[0] += 1000
    watchdog.check()


def test_the_timeout_is_read_at_each_check(clock: list[float]) -> None:
    timeout_s = [1000.0]
    watchdog = Watchdog(lambda: timeout_s[0], lambda: True)
    clock[0] += 100
    watchdog.check()
    timeout_s[0] = 10.0
    with pytest.raises(EngineStuck):
        watchdog.check()
