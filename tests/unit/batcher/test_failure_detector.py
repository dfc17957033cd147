"""Who is dead, silent or absent, and when a missing heartbeat is not taken for a death."""

from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from batcher import worker_registry
from batcher.housekeeping import OrphanTracker
from batcher.scheduling.sequence import Sequence
from batcher.worker_registry import CLOCK_JUMP_MS, STALL_S, FailureDetector, Since, WorkerAbsence
from common.broker.heartbeat import Heartbeat
from common.broker.pool_client import PoolClient
from tests.support.broker_state import KEYS, make_request

# --- failure detector ---------------------------------------------------------------------------------------

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
    monkeypatch.setattr(worker_registry, "time", clock)
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


# --- failure detector worker absence ------------------------------------------------------------------------


async def test_only_a_pool_without_ready_and_starting_workers_waits(redis: Redis) -> None:
    pool = PoolClient(redis, KEYS)
    absence = WorkerAbsence(pool, 30.0)
    assert not await absence.is_over_grace(False)
    pass_time(absence.since, 31.0)
    assert await absence.is_over_grace(False)
    assert not await absence.is_over_grace(True)
    pass_time(absence.since, 31.0)
    assert not await absence.is_over_grace(False), "it begins anew"
    pass_time(absence.since, 31.0)
    starting = Heartbeat(pool, "starting", "w0-1", 5.0)
    await starting.send(doing="loading")
    assert not await absence.is_over_grace(False)
    await starting.remove()
    assert not await absence.is_over_grace(False)
    pass_time(absence.since, 31.0)
    assert await absence.is_over_grace(False)
    await Heartbeat(pool, "sleeper", "w0-1", 5.0).send(state="asleep")
    assert not await absence.is_over_grace(False), "a worker serves other models, and comes"


# --- silence ------------------------------------------------------------------------------------------------

REPORTS, PLANS = ("w1", "reports"), ("w1", "plans")


def pass_time(since: Since[Any], seconds: float) -> None:
    since.since_s = {thing: at_s - seconds for thing, at_s in since.since_s.items()}


def test_a_debt_lasts_while_nothing_new_is_heard_of_it() -> None:
    silence = Since[tuple[str, str, int]]()
    silence.look([(*REPORTS, 3), (*PLANS, 7), ("w2", "takeover", 0)])
    pass_time(silence, 5.0)
    silence.look([(*REPORTS, 4), (*PLANS, 7)])
    assert silence.lasting(5) == [(*PLANS, 7)], "its reports show no newer plan; w2 owes nothing any more"
    pass_time(silence, 4.0)
    silence.look([(*REPORTS, 4), (*PLANS, 8)])
    assert silence.lasting(5) == []
    pass_time(silence, 1.0)
    assert silence.lasting(5) == [(*REPORTS, 4)]
    silence.look([])  # as after a pause: the machine was stopped, the broker was away
    silence.look([(*REPORTS, 4)])
    assert silence.lasting(5) == []


# --- housekeeping -------------------------------------------------------------------------------------------


def sequence(request_id: str, gateway: str, goes_on_ms: int) -> Sequence:
    request = replace(make_request(request_id), gateway=gateway, goes_on_ms=goes_on_ms)
    return Sequence(request, "1-0", 10**15)


async def find(tracker: OrphanTracker, sequences: list[Sequence]) -> list[str]:
    live = {sequence.request_id: sequence for sequence in sequences}
    return await tracker.orphans(live, {sequence.request.gateway for sequence in sequences})


async def test_a_request_whose_client_came_back_has_another_gateway(redis: Redis) -> None:
    """Redis says so; that gateway's own death gives it its grace anew."""
    tracker = OrphanTracker(PoolClient(redis, KEYS))
    sequences = [sequence("r1", "g0", 30_000), sequence("r2", "g0", 30_000)]
    await redis.hset(KEYS.request("r1"), "gateway", "g1")  # type: ignore[misc]
    await redis.hset(KEYS.request("r2"), "gateway", "g0")  # type: ignore[misc]
    await redis.set(KEYS.gateway("g1"), 1)
    assert await find(tracker, sequences) == []
    tracker.absent.since_s["g0"] -= 60
    assert await find(tracker, sequences) == ["r2"]
    await redis.delete(KEYS.gateway("g1"))
    assert await find(tracker, sequences[:1]) == []
    tracker.absent.since_s["g1"] -= 60
    assert await find(tracker, sequences[:1]) == ["r1"]


async def test_a_gateway_that_returns_has_its_whole_grace_again(redis: Redis) -> None:
    tracker = OrphanTracker(PoolClient(redis, KEYS))
    sequences = [sequence("r1", "g0", 600_000)]
    await find(tracker, sequences)
    tracker.absent.since_s["g0"] -= 400
    await redis.set(KEYS.gateway("g0"), 1)
    assert await find(tracker, sequences) == []
    await redis.delete(KEYS.gateway("g0"))
    await find(tracker, sequences)
    tracker.absent.since_s["g0"] -= 400
    assert await find(tracker, sequences) == []
