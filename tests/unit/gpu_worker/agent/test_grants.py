"""Plans as grants, with the pictures that rows must still compute; their stream, when reports are due, and
the agent as a whole with its watchdog.
"""

import asyncio
import random
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from redis.asyncio import Redis

from common.broker import heartbeat
from common.broker.committed import read
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.plan import HeldRow, Plan
from common.messages.records import RECORD, pack_ids
from common.messages.request import Picture
from common.metrics import catalogue
from gpu_worker.agent import grants as grants_module
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.grants import PlanStream
from gpu_worker.agent.publish import Sealed
from gpu_worker.agent.state import ReportClock
from gpu_worker.agent.steps import EngineStuck, Watchdog
from tests.support.agents import grants, plan, reports, start, step
from tests.support.broker_state import KEYS
from tests.support.waiting import PATIENCE_S, wait_until


async def test_unknown_rows_are_reported_preempted(agent: Agent, redis: Redis) -> None:
    agent.plans.apply(plan(agent, stops=[(9, "client")]))
    await agent.flusher.flush()
    (report,) = await reports(redis)
    assert (report.ended, report.released) == ([(9, "preempted", 0)], [(9, 0)])


async def test_an_unreadable_plan_is_counted_and_ends_the_incarnation(agent: Agent, redis: Redis) -> None:
    """It may have started rows, which would wait for their deadlines; its death counts against them."""
    before = catalogue.UNDECODABLE.values[()]
    await redis.xadd(KEYS.plans("w0-1"), {"plan": b"garbage"}, id="7-1")
    await redis.xadd(KEYS.plans("w0-1"), {"plan": encode(Plan(7, 2, 32, 64))}, id="7-2")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Sealed, match="plan 7-1 cannot be read"):
            await agent.serve()
    assert catalogue.UNDECODABLE.values[()] == before + 1
    _, sealed = (await redis.xrange(KEYS.log("w0-1")))[-1]
    assert sealed == {b"sealed": b"w0-1", b"why": b"died"}


async def test_a_worker_is_ready_once_a_batcher_has_taken_it_up(
    agent: Agent, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it has loaded its model it can serve nobody yet."""
    ready = threading.Event()
    monkeypatch.setattr(grants_module, "READY", ready)
    running = asyncio.create_task(agent.run())
    await wait_until(lambda: redis.exists(KEYS.worker("w0-1")))
    assert not ready.is_set()
    await redis.xadd(KEYS.plans("w0-1"), {"plan": encode(Plan(7, 1, 0, 0, takeover=True))}, id="7-1")
    await wait_until(ready.is_set)
    agent.state.draining.set()
    await running


async def test_a_takeover_is_answered_with_all_rows_as_they_are_and_they_go_on(
    agent: Agent, redis: Redis
) -> None:
    """Tokens and ends that the same flush commits count."""
    first = RECORD.pack(9, -1.0)
    await start(agent, row=4)
    await start(agent, row=5, committed=first)
    await start(agent, row=6)
    step(agent, {4: (0, 11), 5: (1, 12)}, prefilled=[(4, 2), (5, 3)])
    agent.plans.apply(plan(agent, blocks=[(4, pack_ids([7, 8]))]))
    agent.plans.apply(plan(agent, stops=[(5, "client")]))
    num_grants = len(grants(agent))
    agent.plans.apply(Plan(8, 1, 0, 0, takeover=True))
    assert len(grants(agent)) == num_grants, "the engine is left alone"
    step(agent, {4: (1, 13)}, ended=[(5, "client", 2)])
    await agent.flusher.flush()
    (report,) = await reports(redis)
    assert (report.epoch, report.takeover, report.step, report.last_row) == (8, True, 2, 6)
    assert report.held == [
        HeldRow(4, "r4", 1, 0, 2, pack_ids([1, 7, 8]), 2, 1),
        HeldRow(5, "r5", 1, 1, 2, pack_ids([1]), 3, 1, ended=True),
        HeldRow(6, "r6", 1, 0, 0, pack_ids([1])),
    ]
    step(agent, {4: (2, 14)}, released=[(5, 4)])
    await agent.flusher.flush()
    later = (await reports(redis))[-1]
    assert (later.takeover, later.held, later.released) == (False, [], [(5, 4)])
    assert (await read(PoolClient(redis, KEYS), ["r4"]))["r4"].num_tokens == 3


# --- pictures -----------------------------------------------------------------------------------------------

TWO: dict[str, Any] = {
    "prompt_ids": pack_ids([5] * 40),
    "pictures": [Picture("aa", 2, 10), Picture("bb", 20, 4)],
}


async def keep(redis: Redis, **contents: bytes) -> None:
    for digest, content in contents.items():
        await redis.set(KEYS.picture(digest), content)


@pytest.mark.parametrize(
    ("num_cached", "needs_all", "digests"),
    [
        (0, False, ["aa", "bb"]),
        (11, False, ["aa", "bb"]),
        (12, False, ["bb"]),
        (24, False, []),
        (24, True, ["aa", "bb"]),  # positions after a picture depend on its size
    ],
)
async def test_a_row_gets_its_pictures_but_those_whose_kv_is_cached(
    agent: Agent, redis: Redis, num_cached: int, needs_all: bool, digests: list[str]
) -> None:
    """A resume gets them again."""
    agent.plans.needs_all = needs_all
    await keep(redis, **{digest: digest.encode() for digest in digests})
    for number in (1, 2):
        await start(agent, number, num_cached=num_cached, **TWO)
        [row] = grants(agent)[-1].starts
        assert [one.decode() for one in row.contents if one] == digests


async def test_a_row_whose_picture_is_lost_never_starts_and_its_request_fails(
    agent: Agent, redis: Redis
) -> None:
    """No other prompt may share blocks that were computed without the picture: it releases none with KV."""
    await keep(redis, aa=b"red")
    await start(agent, **TWO)
    assert grants(agent)[-1].starts == []
    outbox = agent.state.outbox
    assert [(row.request.request_id, why) for row, why in outbox.terminals] == [("r1", "picture_gone")]
    assert (outbox.report.ended, outbox.report.released) == ([(1, "picture_gone", 0)], [(1, 0)])
    await start(agent, 2)
    assert [*agent.state.rows] == [2]


# --- the stream of plans -----------------------------------------------------------------------------------


async def test_every_entry_comes_once_and_in_order_whatever_epochs_begin(redis: Redis) -> None:
    stream, rng = PlanStream(redis, "s"), random.Random(1)
    ids = [f"{epoch}-{number}".encode() for epoch in (1, 2, 5) for number in range(1, 30)]

    async def write() -> None:
        for entry_id in ids:
            await redis.xadd("s", {"plan": b""}, id=entry_id)
            await asyncio.sleep(rng.choice([0, 0, 0.002]))

    async def read() -> list[bytes]:
        found: list[bytes] = []
        while stream.last != ids[-1]:
            found += [entry_id for entry_id, _ in await stream.next()]
        return found

    async with asyncio.timeout(30):
        found, _ = await asyncio.gather(read(), write())
    assert found == ids


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr("gpu_worker.agent.state.time.monotonic", lambda: now_s[0])
    return now_s


def test_a_round_trip_begins_at_the_step_at_which_a_report_is_due(now_s: list[float]) -> None:
    clock = ReportClock()
    clock.on_grant(16)
    for number in range(1, 20):
        clock.on_step(number)
        now_s[0] += 0.002
    assert clock.is_due(19)
    assert clock.on_report(19) == [] and not clock.is_due(20)
    clock.on_grant(16)  # a plan that was on its way, without a grant
    assert clock.on_report(20) == [] and not clock.is_due(21)
    clock.on_grant(35)
    assert clock.on_report(21) == [pytest.approx(8.0)], "from step 16 on"
    assert clock.on_report(22) == [], "once"
    clock.on_grant(60)
    assert clock.on_report(23) == [], "nobody had waited for this one"


async def run_empty_steps(agent: Agent) -> None:
    """Each with a flush."""
    for _ in range(20):
        step(agent)
        await agent.flusher.flush()


async def test_a_report_is_sent_where_a_plan_says_that_it_was_due_at_a_step_that_is_made(
    agent: Agent, redis: Redis
) -> None:
    """An engine that has made all its steps wakes nobody: a batcher that took over grants fewer than the one
    before it, and the engine has made them when its plan comes.
    """
    await start(agent)
    agent.plans.apply(plan(agent, report_at=16))
    await run_empty_steps(agent)
    agent.state.wake.clear()
    agent.plans.apply(plan(agent, report_at=16))
    assert not agent.state.wake.is_set(), "a report has told of that step"
    agent.plans.apply(plan(agent, report_at=18))
    assert agent.state.wake.is_set()
    await agent.flusher.flush()
    assert [report.step for report in await reports(redis)] == [16, 20]


# --- outbox ----------------------------------------------------------------------------------------------


async def test_the_watchdog_watches_while_rows_may_run(agent: Agent) -> None:
    assert not agent.is_busy()
    await start(agent)
    assert agent.is_busy()
    agent.state.step = agent.state.granted.until
    assert not agent.is_busy()


async def test_a_worker_that_was_asked_to_drain_says_so_and_leaves(agent: Agent, redis: Redis) -> None:
    agent.state.idle.clear()  # as with a row: an idle one may leave before it has said so
    running = asyncio.create_task(agent.run())
    keys, name = agent.pool.keys, agent.worker.incarnation
    await wait_until(lambda: agent.pool.run(heartbeat.drain(keys, name)))
    await wait_until(lambda: is_draining(redis, keys.worker(name)))
    assert not agent.state.signalled.is_set(), "its rows have all the time they need"
    agent.state.idle.set()
    await asyncio.wait_for(running, PATIENCE_S)


async def is_draining(redis: Redis, worker: str) -> bool:
    return bool(await redis.hget(worker, "state") == b"draining")  # type: ignore[misc]


@pytest.mark.parametrize("ticks", range(12))
async def test_heartbeats_end_whenever_they_are_cancelled(agent: Agent, ticks: int) -> None:
    """Also in the moment in which they are asked to send one now: else a drained worker stays for ever."""
    await agent.create_streams()
    heartbeats = asyncio.create_task(agent.send_heartbeats())
    await wait_until(lambda: agent.pool.redis.exists(agent.pool.keys.worker(agent.worker.incarnation)))
    await asyncio.sleep(0)
    agent.heartbeat_now.set()
    for _ in range(ticks):
        await asyncio.sleep(0)
    heartbeats.cancel()
    done, _ = await asyncio.wait([heartbeats], timeout=PATIENCE_S)
    assert done and heartbeats.cancelled()


@dataclass
class Machine:
    """A clock, and how long the engine waited for a core."""

    now_s: float = 100.0
    delay_s: float = 0.0
    timeout_s: float = 60.0
    is_busy: bool = True

    def watchdog(self) -> Watchdog:
        return Watchdog(lambda: self.timeout_s, lambda: self.is_busy, lambda: self.delay_s)

    def run(self, watchdog: Watchdog, seconds: int, starved: float = 0.0) -> None:
        """Checks once a second; of each, the engine waits `starved` for a core."""
        for _ in range(seconds):
            self.now_s += 1
            self.delay_s += starved
            watchdog.check()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr("time.monotonic", lambda: made.now_s)
    return made


@pytest.mark.parametrize(("starved", "seconds", "more"), [(0.0, 60, 1), (0.95, 500, 101)])
def test_no_step_for_longer_than_the_timeout_raises(
    machine: Machine, starved: float, seconds: int, more: int
) -> None:
    """The time in which the engine waits for a core is not its own."""
    watchdog = machine.watchdog()
    machine.run(watchdog, seconds, starved)
    with pytest.raises(EngineStuck, match="no step and no answer for"):
        machine.run(watchdog, more, starved)


def test_the_time_without_work_does_not_count_once_there_is_some(machine: Machine) -> None:
    watchdog = machine.watchdog()
    machine.is_busy = False
    machine.run(watchdog, 1000)
    machine.is_busy = True
    machine.run(watchdog, 60)


def test_an_agent_that_was_stopped_reads_its_steps_first(machine: Machine) -> None:
    watchdog = machine.watchdog()
    machine.now_s += 600
    watchdog.check()
