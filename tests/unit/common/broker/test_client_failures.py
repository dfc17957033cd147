"""What is said of a step that fails again and again."""

import logging

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, OutOfMemoryError, ResponseError

from common.broker import client
from common.broker.client import FailureLog, Outage

NO, FULL = "the broker refused (no)", "the broker is out of memory (full)"
ERRORS = {NO: ResponseError("no"), FULL: OutOfMemoryError("full")}


class Clock:
    """Stands for the module `time`."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Clock:
    caplog.set_level(logging.INFO)
    clock = Clock()
    monkeypatch.setattr(client, "time", clock)
    monkeypatch.setattr(client, "OUTAGE", Outage())  # not that of tests before
    return clock


def fail(failing: FailureLog, clock: Clock, seconds: float, cause: str = NO) -> None:
    """Sixteen failures a second."""
    for _ in range(round(seconds * 16)):
        with failing.caught():
            raise ERRORS[cause]
        clock.now_s += 1 / 16


def succeed(failing: FailureLog) -> None:
    """Leave the context by `return`, as most steps do."""
    with failing.caught():
        return


def test_a_repeated_cause_is_said_at_growing_intervals_and_its_end_is_said(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    failing = FailureLog(logging.getLogger(), "a flush")
    succeed(failing)
    fail(failing, clock, 9.0)
    succeed(failing)
    succeed(failing)
    assert caplog.messages == [
        f"a flush failed, trying again: {NO}",
        f"a flush has failed 17 times in 1 s: {NO}",
        f"a flush has failed 33 times in 2 s: {NO}",
        f"a flush has failed 65 times in 4 s: {NO}",
        f"a flush has failed 129 times in 8 s: {NO}",
        "a flush has succeeded again, after 144 failures in 9.0 s",
    ]


def test_intervals_end_at_a_minute(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    failing = FailureLog(logging.getLogger(), "a flush")
    fail(failing, clock, 600.0)
    assert len(caplog.messages) == 7 + 9, "up to the 64th second, then each minute"


def test_a_new_cause_is_said_at_once_and_causes_in_turn_are_not(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    failing = FailureLog(logging.getLogger(), "a flush")
    for _ in range(5):
        fail(failing, clock, 1 / 16, NO)
        fail(failing, clock, 1 / 16, FULL)
    assert caplog.messages == [f"a flush failed, trying again: {cause}" for cause in (NO, FULL)]


def test_the_next_failures_are_counted_anew(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    failing = FailureLog(logging.getLogger(), "a flush")
    for _ in range(2):
        fail(failing, clock, 1 / 16)
        succeed(failing)
    said = f"a flush failed, trying again: {NO}", "a flush has succeeded again, after 1 failure in 0.1 s"
    assert caplog.messages == [*said, *said]


def test_a_failure_after_a_minute_without_one_begins_anew(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that never returns says nothing of its success."""
    failing = FailureLog(logging.getLogger(), "reading jobs")
    fail(failing, clock, 1 / 16)
    clock.now_s += 3600
    fail(failing, clock, 1 / 16)
    assert caplog.messages == [f"reading jobs failed, trying again: {NO}"] * 2


def test_only_errors_of_the_broker_are_caught(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    failing = FailureLog(logging.getLogger(), "a flush")
    with pytest.raises(LookupError), failing.caught():
        raise LookupError
    assert caplog.messages == []


async def test_a_write_to_a_closed_transport_is_a_lost_connection(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await redis.ping()
    (connection,) = redis.connection_pool._available_connections

    def fail(_: list[bytes]) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    monkeypatch.setattr(connection._writer, "writelines", fail)  # as uvloop's does
    with pytest.raises(ConnectionError):
        await connection.send_command("PING")
    assert await redis.ping()
