"""What a process says of an outage of its broker, and of a step that fails again and again."""

import logging

import pytest
from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, ConnectionError, ResponseError

from common.broker import client
from common.broker.client import FailureLog, new_outage

AWAY = "no connection to the broker (refused)"
STEPS = [FailureLog(logging.getLogger(), step) for step in ("reading plans", "a flush", "a heartbeat")]


NO = "the broker refused (no)"


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
    monkeypatch.setattr(client, "OUTAGE", new_outage())  # not that of tests before
    return clock


def fail(clock: Clock, seconds: float, steps: list[FailureLog], error: Exception) -> None:
    """Each step fails sixteen times a second."""
    for _ in range(round(seconds * 16)):
        for step in steps:
            with step.caught():
                raise error
        clock.now_s += 1 / 16


def succeed(*steps: FailureLog) -> None:
    """Leave the context by `return`, as most steps do."""
    for step in steps:
        with step.caught():
            continue


def test_an_outage_has_one_line_at_its_beginning_and_one_at_its_end(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    succeed(*STEPS)
    fail(clock, 4.0, STEPS, OSError("refused"))
    fail(clock, 0.5, STEPS, BusyLoadingError())
    succeed(*STEPS)
    clock.now_s += 1.0
    succeed(*STEPS)
    succeed(*STEPS)
    assert caplog.messages == [
        f"the broker failed, trying again: reading plans: {AWAY}",
        "the broker has succeeded again, after 216 failures in 5.5 s",
    ]


def test_a_repeated_cause_is_said_every_minute_and_its_end_is_said(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    failing = FailureLog(logging.getLogger(), "a flush")
    succeed(failing)
    fail(clock, 61.0, [failing], ResponseError("no"))
    succeed(failing)
    succeed(failing)
    assert caplog.messages == [
        f"a flush failed, trying again: {NO}",
        f"a flush failed, trying again: {NO}",
        "a flush has succeeded again, after 976 failures in 61.0 s",
    ]


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
