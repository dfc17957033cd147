"""Who is dead, silent or absent, and when a missing heartbeat is not taken for a death.
WorkerRegistry: each worker's state from its first heartbeat to its removal.
Lease: one holder at a time, epochs that rise, and a batcher that leaves when nobody needs it.
"""

import asyncio
import time
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from batcher import worker_registry
from batcher.housekeeping import OrphanTracker
from batcher.inbox import Inbox
from batcher.lease import (
    HEARTBEATS_TO_SHOW,
    HeartbeatCount,
    Lease,
    LeaseLost,
    PoolClock,
    WritesLost,
    is_needed,
)
from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from batcher.worker_registry import (
    CLOCK_JUMP_MS,
    STALL_S,
    FailureDetector,
    KnownWorker,
    Since,
    WorkerRegistry,
    WorkerState,
)
from common.broker.heartbeat import Heartbeat
from common.broker.lua import Reply, ScriptCall
from common.broker.pool_client import PoolClient
from common.messages.plan import Report
from tests.support.broker_state import KEYS, send_heartbeat, start_worker
from tests.support.fleet.simulated_pool import make_replica, request
from tests.support.machine.clock import Clock

# --- failure detector ---------------------------------------------------------------------------------------

TTL_S = 5.0


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


def test_a_smaller_step_back_of_the_broker_s_clock_kills_no_worker(detector: FailureDetector) -> None:
    detector.check_clock_jump(1_000_000)
    detector.resumes_s = 0.0
    now_ms = 1_000_000 - (CLOCK_JUMP_MS - 100)
    detector.check_clock_jump(now_ms)
    assert detector.active and not detector.is_dead(True, 1_000_000, now_ms)


# --- failure detector worker absence ------------------------------------------------------------------------


async def test_only_a_pool_without_ready_and_starting_workers_waits(redis: Redis) -> None:
    pool, scheduler = PoolClient(redis, KEYS), Scheduler(WorkerLimits(), 1)
    workers = WorkerRegistry(pool, Inbox(redis), scheduler, FailureDetector(TTL_S))
    assert await workers.absent_s() < 30
    pass_time(workers.absence, 31.0)
    assert await workers.absent_s() > 30
    scheduler.workers.add(make_replica())
    assert await workers.absent_s() == 0
    pass_time(workers.absence, 31.0)
    scheduler.workers.remove("w1")
    assert await workers.absent_s() < 30, "it begins anew"
    pass_time(workers.absence, 31.0)
    starting = Heartbeat(pool, "starting", "w0-1", 5.0)
    await starting.send(doing="loading")
    assert await workers.absent_s() == 0
    await starting.remove()
    assert await workers.absent_s() < 30
    pass_time(workers.absence, 31.0)
    assert await workers.absent_s() > 30
    await Heartbeat(pool, "sleeper", "w0-1", 5.0).send(state="asleep")
    assert await workers.absent_s() == 0, "a worker serves other models, and comes"


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


async def find(tracker: OrphanTracker, sequences: list[Sequence]) -> list[str]:
    live = {sequence.request_id: sequence for sequence in sequences}
    return await tracker.orphans(live, {sequence.request.gateway for sequence in sequences})


async def test_a_request_whose_client_came_back_has_another_gateway(redis: Redis) -> None:
    """Redis says so; that gateway's own death gives it its grace anew."""
    tracker = OrphanTracker(PoolClient(redis, KEYS))
    sequences = [request(name, 4, 20, gateway="g0", goes_on_ms=30_000) for name in ("r1", "r2")]
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
    sequences = [request("r1", 4, 20, gateway="g0", goes_on_ms=600_000)]
    await find(tracker, sequences)
    tracker.absent.since_s["g0"] -= 400
    await redis.set(KEYS.gateway("g0"), 1)
    assert await find(tracker, sequences) == []
    await redis.delete(KEYS.gateway("g0"))
    await find(tracker, sequences)
    tracker.absent.since_s["g0"] -= 400
    assert await find(tracker, sequences) == []


# --- worker registry ----------------------------------------------------------------------------------------

EPOCH = 7
ANSWER = Report(1, EPOCH, 1, 3, takeover=True)


@pytest.fixture
def workers(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> WorkerRegistry:
    """They are checked by a process that the machine may stop for a while."""
    monkeypatch.setattr(worker_registry, "STALL_S", 60.0)
    monkeypatch.setattr(worker_registry, "CLOCK_JUMP_MS", 60_000)
    scheduler = Scheduler(WorkerLimits(), EPOCH)
    detector = FailureDetector(5.0)
    detector.check_clock_jump(round(time.time() * 1000))
    detector.resumes_s = 0.0
    return WorkerRegistry(PoolClient(redis, KEYS), Inbox(redis), scheduler, detector)


def answer_takeover(workers: WorkerRegistry, incarnation: str) -> None:
    assert workers.answers_takeover(incarnation, ANSWER)
    assert workers.activate(incarnation, ANSWER, []) == []


@pytest.mark.parametrize(
    "report", [Report(1, EPOCH, 1, 3), Report(1, EPOCH - 1, 1, 3, takeover=True)], ids=["rows", "epoch"]
)
async def test_only_the_answer_to_this_takeover_makes_it_active(
    redis: Redis, workers: WorkerRegistry, report: Report
) -> None:
    await start_worker(redis, "w1")
    await workers.check()
    assert not workers.answers_takeover("w1", report)
    assert workers.state("w1") is WorkerState.TAKEOVER_SENT


async def test_workers_from_before_the_epoch_are_pending_until_they_answer_or_are_removed(
    redis: Redis, workers: WorkerRegistry
) -> None:
    for incarnation in ("w1", "w2"):
        await start_worker(redis, incarnation)
    await workers.start_epoch()
    await start_worker(redis, "new")
    await workers.check()
    assert sorted(workers.pending_takeovers()) == ["w1", "w2"]
    answer_takeover(workers, "w1")
    await workers.seal("w2")
    await workers.remove_worker_keys("w2")
    assert list(workers.pending_takeovers()) == []
    assert workers.state("new") is WorkerState.TAKEOVER_SENT


async def test_a_heartbeat_from_before_the_clock_went_back_is_none(
    redis: Redis, workers: WorkerRegistry
) -> None:
    await start_worker(redis, "w1")
    await start_worker(redis, "w2")
    await redis.zincrby(KEYS.workers, 900_000, "w1")
    assert await workers.check() == ["w1"]
    await send_heartbeat(redis, "w1")
    assert await workers.check() == []


async def test_a_removed_worker_is_not_taken_over_again_and_forgotten_once_it_is_not_listed(
    redis: Redis, workers: WorkerRegistry
) -> None:
    await start_worker(redis, "w1")
    await workers.check()
    await workers.seal("w1")
    await workers.remove_worker_keys("w1")
    await redis.hset(KEYS.worker("w1"), "state", "ready")  # type: ignore[misc]
    await redis.zadd(KEYS.workers, {"w1": 1})
    assert await workers.check() == []
    assert workers.state("w1") is WorkerState.REMOVED
    assert KEYS.reports("w1") not in workers.inbox.last_ids
    await redis.zrem(KEYS.workers, "w1")
    for _ in range(2):
        assert await workers.check() == []
    assert not workers.workers, "each turn of a model is an incarnation"


async def test_a_worker_that_drains_at_its_takeover_is_given_no_rows_of_another(
    redis: Redis, workers: WorkerRegistry
) -> None:
    for name in ("w1", "w2"):
        await start_worker(redis, name)
        await send_heartbeat(redis, name, state="draining")
    await workers.start_epoch()
    for name in ("w1", "w2"):
        answer_takeover(workers, name)
    assert [replica.draining for replica in workers.scheduler.replicas.values()] == [True, True]


async def test_a_worker_may_be_taken_over_while_all_are_checked(
    redis: Redis, workers: WorkerRegistry
) -> None:
    """The check runs beside the batcher's turns, which take over what has just said that it is ready."""
    await start_worker(redis, "w1")
    await workers.send_takeover("w1")
    check = asyncio.create_task(workers.check())
    await asyncio.sleep(0)  # it asks the broker
    workers.workers["w2"] = KnownWorker()
    assert await check == []


# --- lease --------------------------------------------------------------------------------------------------

LONG_S = 60.0


def make_lease(redis: Redis, holder: str, ttl_s: float = LONG_S) -> Lease:
    return Lease(PoolClient(redis, KEYS), holder, ttl_s)


async def test_a_broker_that_may_lack_what_was_written_ends_the_epoch(redis: Redis) -> None:
    lease = make_lease(redis, "b0")
    await lease.acquire()
    server_id, lease.server_id = lease.server_id, "another"
    with pytest.raises(WritesLost, match="replaced"):
        await lease.renew()
    lease.server_id, lease.clock = server_id, PoolClock(9_000_000)
    await redis.flushdb()
    with pytest.raises(WritesLost, match="everything"):
        await lease.renew()
    await lease.acquire()
    assert lease.clock.now_ms() >= 9_000_000


async def test_an_expired_lease_that_nobody_took_is_renewed(redis: Redis) -> None:
    lease = make_lease(redis, "b0")
    epoch = await lease.acquire()
    await redis.delete(KEYS.batcher)
    await lease.renew()
    assert lease.epoch == str(epoch) and await redis.get(KEYS.batcher) == b"b0"


async def test_renewing_after_a_newer_epoch_raises_though_nobody_holds_it_now(redis: Redis) -> None:
    lease, other = make_lease(redis, "b0"), make_lease(redis, "b1")
    await lease.acquire()
    await redis.delete(KEYS.batcher)
    await other.acquire()
    await other.release()
    with pytest.raises(LeaseLost):
        await lease.renew()


async def test_releasing_without_a_broker_raises_nothing(redis: Redis) -> None:
    class AbsentPool(PoolClient):
        async def run(self, call: ScriptCall[Reply]) -> Reply:
            raise ConnectionError("away")

    lease = make_lease(redis, "b0")
    await lease.acquire()
    lease.pool = AbsentPool(redis, KEYS)
    await lease.release()
    assert await redis.get(KEYS.batcher) == b"b0"


async def test_a_lease_that_may_have_expired_is_confirmed_by_the_broker(redis: Redis) -> None:
    lease = make_lease(redis, "b0")
    await lease.acquire()
    await redis.incr(KEYS.epoch)
    await lease.confirm()  # it cannot have expired
    lease.expires_s = 0.0
    with pytest.raises(LeaseLost):
        await lease.confirm()


async def test_the_holder_sets_the_pool_s_clock_and_a_successor_goes_on_from_there(redis: Redis) -> None:
    first = make_lease(redis, "b0")
    await first.acquire()
    first.clock = PoolClock(5000)
    await first.renew()
    assert int(await redis.get(KEYS.clock)) >= 5000
    await first.release()
    second = make_lease(redis, "b1")
    await second.acquire()
    assert 5000 <= second.clock.now_ms() < 65_000


async def test_a_lease_that_does_not_expire_is_taken_over_when_the_pool_s_clock_stops(redis: Redis) -> None:
    first = make_lease(redis, "b0")
    first_epoch = await first.acquire()
    await first.renew()
    assert await make_lease(redis, "b1", ttl_s=0.2).acquire() > first_epoch
    with pytest.raises(LeaseLost):
        await first.renew()


async def test_a_lease_is_not_taken_over_while_the_pool_s_clock_goes_on(redis: Redis) -> None:
    lease, standby = make_lease(redis, "b0"), make_lease(redis, "b1", ttl_s=0.0)
    await lease.acquire()
    await lease.renew()
    stopped_ms = await redis.get(KEYS.clock)
    assert await standby.watch_clock() == b"", "it was seen for the first time"
    lease.clock = PoolClock(60_000)
    await lease.renew()
    assert (await standby.run_script(LONG_S, stopped_ms))[0] == ""
    assert await standby.watch_clock() == b""


async def test_of_two_that_saw_the_pool_s_clock_stop_one_takes_the_lease(redis: Redis) -> None:
    dead = make_lease(redis, "b0")
    await dead.acquire()
    await dead.renew()
    first, second = (make_lease(redis, name) for name in ("b1", "b2"))
    stopped_ms = await redis.get(KEYS.clock)
    first.epoch, first.server_id = await first.run_script(LONG_S, stopped_ms)
    assert first.epoch and (await second.run_script(LONG_S, stopped_ms))[0] == ""
    await first.renew()


# --- lease departure ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_standby", "gateways", "stays"),
    [
        (False, [("draining", 3, True), ("ready", 0, True)], True),
        (True, [("draining", 3, True)], False),
        (False, [("draining", 0, False)], False),
        (False, [("ready", 3, True)], False),
        (False, [("died", 3, False)], False),
        (False, [], False),
        (True, [("ready", 0, False)], True),  # it has not shown yet whether it ends
    ],
)
async def test_it_stays_for_streams_of_gateways_that_end_with_it(
    redis: Redis, has_standby: bool, gateways: list[tuple[str, int, bool]], stays: bool
) -> None:
    """Of each gateway: its state, its streams, and whether it has shown since that it was told to end."""
    pool, seen = PoolClient(redis, KEYS), (HeartbeatCount(), HeartbeatCount())
    if has_standby:
        await Heartbeat(pool, "batcher", "b1", 60.0).send()
        seen[0].counts["b1"] = HEARTBEATS_TO_SHOW
    for i, (state, num_streams, is_believed) in enumerate(gateways):
        await Heartbeat(pool, "gateway", f"g{i}", 60.0).send(state=state, streams=num_streams)
        seen[1].counts[f"g{i}"] = HEARTBEATS_TO_SHOW * is_believed
    assert await is_needed(pool, "b0", *seen) is stays


async def test_a_standby_without_newer_heartbeats_does_not_count(redis: Redis) -> None:
    """It may have been told to end at the same time."""
    pool, seen = PoolClient(redis, KEYS), (HeartbeatCount(), HeartbeatCount())
    await Heartbeat(pool, "gateway", "g0", 60.0).send(state="draining", streams=1)
    await Heartbeat(pool, "batcher", "b1", 60.0).send()
    for _ in range(2 * HEARTBEATS_TO_SHOW):
        assert await is_needed(pool, "b0", *seen)
    for number in range(1, HEARTBEATS_TO_SHOW + 1):
        await redis.zincrby(KEYS.processes, 1, "batcher:b1")
        assert await is_needed(pool, "b0", *seen) == (number < HEARTBEATS_TO_SHOW)
