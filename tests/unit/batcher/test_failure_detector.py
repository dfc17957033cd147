"""FailureDetector: who is dead, and when a missing heartbeat is not taken for a death."""

import pytest

from batcher import failure_detector
from batcher.failure_detector import CLOCK_JUMP_MS, STALL_S, FailureDetector

TTL_S = 5.0


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(failure_detector, "time", clock)
    return clock


@pytest.fixture
def detector(clock: Clock) -> FailureDetector:
    """One that was paused at its start and is active now."""
    detector = FailureDetector(TTL_S)
    assert not detector.active
    clock.now_s += TTL_S
    detector.checked_s = clock.now_s
    assert detector.active
    return detector


def test_the_first_check_pauses(clock: Clock) -> None:
    """The clock may have jumped while the epoch began: that was not seen."""
    detector = FailureDetector(TTL_S)
    clock.now_s += TTL_S - 0.1
    detector.check_clock_jump(1_000_000)
    clock.now_s += TTL_S - 0.1
    assert not detector.active
    clock.now_s += 0.1
    assert detector.active


def test_a_pause_lasts_one_ttl(detector: FailureDetector, clock: Clock) -> None:
    detector.pause()
    clock.now_s += TTL_S - 0.1
    assert not detector.active
    clock.now_s += 0.1
    assert detector.active


@pytest.mark.parametrize(("waited_s", "active"), [(STALL_S - 0.1, True), (STALL_S + 0.1, False)])
def test_a_long_time_between_two_checks_pauses(
    detector: FailureDetector, clock: Clock, waited_s: float, active: bool
) -> None:
    clock.now_s += waited_s
    detector.check_stall()
    assert detector.active is active
    detector.resumes_s = 0.0
    detector.check_stall()
    assert detector.active, "the time is counted from the last check"


@pytest.mark.parametrize("jump_ms", [CLOCK_JUMP_MS + 1, -CLOCK_JUMP_MS - 1])
def test_a_jump_of_the_broker_s_clock_pauses(detector: FailureDetector, clock: Clock, jump_ms: int) -> None:
    detector.check_clock_jump(1_000_000)
    detector.resumes_s = 0.0
    clock.now_s += 1.0
    detector.check_clock_jump(1_001_000)
    assert detector.active, "it moved as ours did"
    detector.check_clock_jump(1_001_000 + jump_ms)
    assert not detector.active


def test_the_broker_s_clock_is_extrapolated(detector: FailureDetector, clock: Clock) -> None:
    detector.check_clock_jump(1_000_000)
    clock.now_s += 2.5
    assert detector.now_ms() == 1_002_500


@pytest.mark.parametrize(
    ("has_heartbeat", "seen_ms", "is_dead"),
    [(True, 1000.0, False), (False, 1000.0, True), (True, 1001.0, True)],
    ids=["heartbeat", "none", "one of the future"],
)
def test_a_worker_without_a_heartbeat_is_dead_unless_detection_is_paused(
    detector: FailureDetector, has_heartbeat: bool, seen_ms: float, is_dead: bool
) -> None:
    assert detector.is_dead(has_heartbeat, seen_ms, 1000.0) is is_dead
    detector.pause()
    assert not detector.is_dead(has_heartbeat, seen_ms, 1000.0)
