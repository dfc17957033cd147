"""WorkerRegistry: each worker's state from its first heartbeat to its removal."""

import asyncio
import time

import pytest
from redis.asyncio import Redis

from batcher import worker_registry
from batcher.inbox import Inbox, StreamEntry
from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from batcher.worker_registry import (
    LOST_S,
    SILENT_S,
    FailureDetector,
    KnownWorker,
    WorkerRegistry,
    WorkerState,
)
from common.broker.pool_client import PoolClient
from common.messages.codec import decode
from common.messages.plan import Plan, Report
from tests.support.broker_state import KEYS, send_heartbeat, start_worker

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


async def plans(redis: Redis, incarnation: str) -> list[Plan]:
    entries = await redis.xrange(KEYS.plans(incarnation))
    return [decode(Plan, fields[b"plan"]) for _, fields in entries]


async def test_a_new_worker_is_taken_over_once_and_then_active(redis: Redis, workers: WorkerRegistry) -> None:
    await start_worker(redis, "w1")
    for _ in range(2):
        assert await workers.check() == []
    assert [plan.takeover for plan in await plans(redis, "w1")] == [True]
    assert workers.state("w1") is WorkerState.TAKEOVER_SENT
    answer_takeover(workers, "w1")
    assert workers.state("w1") is WorkerState.ACTIVE
    assert not workers.answers_takeover("w1", ANSWER), "once"
    replica = workers.scheduler.replicas["w1"]
    assert (replica.step, replica.until) == (3, 3)


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


async def test_a_jump_of_the_broker_s_clock_that_ends_heartbeats_seals_nobody(
    redis: Redis, workers: WorkerRegistry
) -> None:
    """It may come between any two commands."""
    await start_worker(redis, "w1")
    await workers.check()
    await redis.delete(KEYS.worker("w1"))
    assert workers.detector.clock_offset_ms is not None
    workers.detector.clock_offset_ms -= 900_000
    assert await workers.check() == []


async def test_a_heartbeat_from_before_the_clock_went_back_is_none(
    redis: Redis, workers: WorkerRegistry
) -> None:
    await start_worker(redis, "w1")
    await start_worker(redis, "w2")
    await redis.zincrby(KEYS.workers, 900_000, "w1")
    assert await workers.check() == ["w1"]
    await send_heartbeat(redis, "w1")
    assert await workers.check() == []


@pytest.mark.parametrize(("is_earlier", "sealed"), [(True, ["w1"]), (False, [])])
async def test_an_unreadable_worker_is_sealed_if_it_may_hold_requests(
    redis: Redis, workers: WorkerRegistry, is_earlier: bool, sealed: list[str]
) -> None:
    await start_worker(redis, "w1", b"junk")
    if is_earlier:
        await workers.start_epoch()
    assert await workers.check() == sealed
    assert workers.state("w1") is WorkerState.UNREADABLE
    assert await plans(redis, "w1") == []


async def test_a_removed_worker_is_not_taken_over_again(redis: Redis, workers: WorkerRegistry) -> None:
    await start_worker(redis, "w1")
    await workers.check()
    await workers.seal("w1")
    await workers.remove_worker_keys("w1")
    await redis.hset(KEYS.worker("w1"), "state", "ready")  # type: ignore[misc]
    await redis.zadd(KEYS.workers, {"w1": 1})
    assert await workers.check() == []
    assert workers.state("w1") is WorkerState.REMOVED
    assert KEYS.reports("w1") not in workers.inbox.last_ids


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


async def test_the_death_of_a_process_is_that_of_its_last_incarnation(
    redis: Redis, workers: WorkerRegistry
) -> None:
    """Its launcher knows the first one only."""
    for incarnation in ("w1-a.2", "w1-b", "w2-a"):
        await start_worker(redis, incarnation)
    await workers.start_epoch()
    assert workers.incarnations("w1-a") == {"w1-a", "w1-a.2"}
    assert workers.dead_holders([], {"w1-a", "w2-a"}) == ["w1-a.2", "w2-a"]


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


async def test_a_worker_that_does_not_answer_a_takeover_is_silent_then_sealed(
    redis: Redis, workers: WorkerRegistry
) -> None:
    for worker in ("w1", "w2"):
        await start_worker(redis, worker)
    assert await workers.check() == []
    answer_takeover(workers, "w2")
    wait(workers, SILENT_S)
    assert await workers.check() == []
    assert workers.silent == {"w1"}
    wait(workers, LOST_S)
    assert await workers.check() == ["w1"]
    workers.inbox.unhandled.append(StreamEntry(KEYS.reports("w1"), "1-0", {}))
    assert await workers.check() == [], "what it has said is not handled yet"
    workers.inbox.unhandled.clear()
    await workers.check()
    wait(workers, LOST_S)
    workers.detector.pause()
    assert await workers.check() == []
    workers.detector.resumes_s = 0.0
    assert await workers.check() == [], "it has the whole time again"


def wait(workers: WorkerRegistry, seconds: float) -> None:
    since = workers.silence
    since.since_s = {debt: at_s - seconds for debt, at_s in since.since_s.items()}
