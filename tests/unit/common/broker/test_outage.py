"""What a process says of an outage of its broker, whatever number of its steps fail."""

import logging

import pytest
from redis.exceptions import BusyLoadingError

from common.broker import client
from common.broker.client import FailureLog, Outage
from tests.unit.common.broker.test_client_failures import Clock

AWAY = "no connection to the broker (refused)"
STEPS = [FailureLog(logging.getLogger(), step) for step in ("reading plans", "a flush", "a heartbeat")]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Clock:
    caplog.set_level(logging.INFO)
    clock = Clock()
    monkeypatch.setattr(client, "time", clock)
    monkeypatch.setattr(client, "OUTAGE", Outage())
    return clock


def fail(clock: Clock, seconds: float, error: Exception | None = None) -> None:
    """Each step fails four times a second."""
    for _ in range(round(seconds * 4)):
        for step in STEPS:
            with step.caught():
                raise error or OSError("refused")
        clock.now_s += 1 / 4


def succeed() -> None:
    for step in STEPS:
        with step.caught():
            pass


def test_an_outage_has_one_line_at_its_beginning_and_one_at_its_end(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    succeed()
    fail(clock, 4.0)
    fail(clock, 0.5, BusyLoadingError())
    succeed()
    clock.now_s += 1.0
    succeed()
    succeed()
    assert caplog.messages == [
        f"outage of the broker, everything is tried again: reading plans: {AWAY}",
        "outage of the broker is over after 4.2 s, 54 failures",
    ]


def test_a_long_outage_is_counted_at_growing_intervals_of_at_most_a_minute(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    fail(clock, 11.0)
    assert caplog.messages[1:] == [
        f"outage of the broker for {age} s, {count} failures: reading plans: {AWAY}"
        for age, count in ((5, 61), (10, 121))
    ]
    fail(clock, 600.0)
    assert len(caplog.messages) == 1 + 5 + 8, "after 5, 10, 20, 40 and 80 seconds, then each minute"


def test_where_one_step_fails_and_others_succeed_the_outage_goes_on(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """As if the broker had no room for one more connection."""
    for _ in range(16):
        with STEPS[0].caught():
            raise OSError("refused")
        with STEPS[1].caught():
            pass
        clock.now_s += 1 / 4
    assert len(caplog.messages) == 1


def test_a_failure_long_after_the_last_one_begins_another_outage(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        fail(clock, 1 / 4)
        clock.now_s += 3600
    assert [line.split(":")[0] for line in caplog.messages] == [
        "outage of the broker, everything is tried again"
    ] * 2
