"""The active batcher, turn by turn, against a real broker: lost replies, garbage, keys of another type.
ActionQueue: scripts are sent at once, whatever replies are due, and nothing is done out of order.
Inbox: entries in order, handled in slices; how far a stream is done; when a time to live began.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError

from batcher import batcher_scripts, inbox, worker_registry
from batcher.actions import ActionQueue, ScriptAction
from batcher.housekeeping import Housekeeping
from batcher.inbox import Inbox, StreamEntry
from batcher.lease import Lease, WritesLost
from batcher.loop import Batcher
from common.broker.keys import Keys, parse_stream_id
from common.broker.pool_client import PoolClient
from common.messages.codec import decode, encode
from common.messages.plan import Plan, Report, WorkerDied
from common.metrics import catalogue
from common.settings.settings import Settings
from tests.support.broker_state import KEYS, admit, make_request, run_all, seal, start_worker


@pytest.fixture
async def batcher(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Batcher]:
    """One that waits for no entry: what its tests write is there before a turn."""
    monkeypatch.setattr(Housekeeping, "left_ms", 0)
    monkeypatch.setattr(Housekeeping, "wait_ms", 1)
    monkeypatch.setattr(worker_registry, "STALL_S", 60.0)  # the machine may stop us for a while
    pool = PoolClient(redis, KEYS)
    lease = Lease(pool, "b0-1", 60.0)
    batcher = Batcher(Settings(), pool, lease, await lease.acquire())
    yield batcher
    batcher.close()


async def turns(batcher: Batcher, most: int = 6) -> None:
    """Turns in which a read has come, and the housekeeping that each starts."""
    num_reads = 0
    while num_reads < most or batcher.pending.sent:
        await batcher.retry(batcher.turn)
        num_reads += batcher.inbox.reading is None
        if batcher.housekeeping.tasks:
            await asyncio.wait(batcher.housekeeping.tasks)


async def join(batcher: Batcher, redis: Redis) -> None:
    """Start a worker, and answer the takeover for it."""
    await start_worker(redis, "w1")
    await turns(batcher, 2)
    answer = encode(Report(1, batcher.epoch, 1, 0, takeover=True))
    await redis.xadd(KEYS.reports("w1"), {"report": answer}, id="1-0")
    await turns(batcher, 2)
    assert "w1" in batcher.scheduler.replicas


async def plans(redis: Redis) -> list[Plan]:
    return [decode(Plan, fields[b"plan"]) for _, fields in await redis.xrange(KEYS.plans("w1"))]


def lose_reply(batcher: Batcher, number: int) -> None:
    """Lose the connection when the reply to plan `number` comes."""
    pending, replies = batcher.pending, count(1)
    real = pending.on_reply

    def flaky(reply: Any) -> None:
        if isinstance(reply, list) and next(replies) == number and pending.connection is not None:
            pending.connection.fail(ConnectionError("cut"))
        else:
            real(reply)

    pending.on_reply = flaky  # type: ignore[method-assign]


def hold_replies(batcher: Batcher) -> Callable[[], None]:
    """Hold what the broker replies to plans. Return what lets it come."""
    pending, held = batcher.pending, list[Any]()
    real = pending.on_reply
    pending.on_reply = held.append  # type: ignore[method-assign, assignment]

    def release() -> None:
        pending.on_reply = real  # type: ignore[method-assign]
        assert pending.connection is not None
        pending.connection.on_reply = real
        for reply in held:
            real(reply)

    return release


async def test_a_worker_that_seals_its_own_logs_is_counted_as_lost_once(
    batcher: Batcher, redis: Redis
) -> None:
    """Its launcher reports its death, too, before or after its seal has been read."""
    await batcher.start_epoch()
    await join(batcher, redis)
    lost = catalogue.WORKERS_LOST.values[()]
    await seal(redis, "w1")
    for _ in range(2):
        await redis.xadd(KEYS.control, {"died": encode(WorkerDied("w1"))})
        await turns(batcher, 3)
    assert "w1" not in batcher.scheduler.replicas
    assert catalogue.WORKERS_LOST.values[()] == lost + 1


@pytest.mark.parametrize("lost", [1, 2])
async def test_a_lost_reply_of_publish_plan_loses_no_refused_row(
    batcher: Batcher, redis: Redis, lost: int
) -> None:
    await batcher.start_epoch()
    await join(batcher, redis)
    await admit(redis, make_request("keep"))
    await admit(redis, make_request("gone"))
    await redis.hset(KEYS.request("gone"), "cancel", "1")  # type: ignore[misc]
    lose_reply(batcher, lost)
    await turns(batcher)
    assert [row.sequence.request_id for row in batcher.scheduler.replicas["w1"].rows.values()] == ["keep"]
    assert [start.request.request_id for plan in await plans(redis) for start in plan.starts] == ["keep"]
    assert list(batcher.scheduler.sequences) == ["keep"]
    assert await redis.hget(KEYS.request("gone"), "terminal") == b"cancelled"  # type: ignore[misc]
    assert await redis.xlen(KEYS.requests) == 1


async def test_reports_of_a_dead_worker_are_read_up_to_the_seal(batcher: Batcher, redis: Redis) -> None:
    await batcher.start_epoch()
    await join(batcher, redis)
    await admit(redis, make_request("r1"))
    await turns(batcher, 2)
    await redis.xadd(
        KEYS.reports("w1"),
        {"report": encode(Report(2, batcher.epoch, 2, 5, ended=[(1, "length", 20)]))},
        id="2-0",
    )
    await redis.hset(KEYS.request("r1"), "terminal", "length")  # type: ignore[misc]
    await batcher.recovery.seal("w1", "test")
    await turns(batcher)
    assert not batcher.scheduler.sequences, "it had ended before the seal"
    assert await redis.xlen(KEYS.requests) == 0
    assert await redis.exists(KEYS.log("w1"), KEYS.reports("w1"), KEYS.plans("w1")) == 0


async def test_a_request_that_a_recovery_has_resumed_is_placed_without_a_wait_for_an_entry(
    batcher: Batcher, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No task of housekeeping ends the wait."""
    await batcher.start_epoch()
    await join(batcher, redis)
    monkeypatch.setattr(Housekeeping, "wait_ms", 60_000)
    monkeypatch.setattr(batcher.housekeeping, "start", lambda *_: None)
    await admit(redis, replace(make_request("r1"), num_shown=1))
    async with asyncio.timeout(30):
        while len(await plans(redis)) < 2:
            await batcher.turn()
    assert [start.request.request_id for start in (await plans(redis))[1].starts] == ["r1"]


async def test_plans_and_entries_come_between_two_long_actions(batcher: Batcher, redis: Redis) -> None:
    """The first waits for the reply to the plan that was decided before it."""
    seen: list[tuple[int, int]] = []

    async def recover() -> None:
        seen.append((len(await plans(redis)), len(batcher.pending.sent)))
        await admit(redis, make_request(f"r{len(seen) + 1}"))

    await batcher.start_epoch()
    await join(batcher, redis)
    await admit(redis, make_request("r1"))
    while len(await plans(redis)) < 2:
        await batcher.turn()
    batcher.pending.defer(recover)
    batcher.pending.defer(recover)
    async with asyncio.timeout(30):
        while len(seen) < 1:
            await batcher.turn()
        assert batcher.pending.deferred
        while batcher.pending:
            await batcher.turn()
        while len(await plans(redis)) < 4:
            await batcher.turn()
    assert seen[0] == (2, 0) and not seen[1][1]
    assert {"r1", "r2", "r3"} == {
        start.request.request_id for plan in await plans(redis) for start in plan.starts
    }


async def test_a_request_waits_for_no_housekeeping(
    batcher: Batcher, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await batcher.start_epoch()
    await join(batcher, redis)
    monkeypatch.setattr(batcher.housekeeping, "run", lambda *_: asyncio.sleep(60))
    await batcher.turn()
    await admit(redis, make_request("r1"))
    async with asyncio.timeout(30):
        while len(await plans(redis)) < 2:
            await batcher.turn()
    assert not any(task.done() for task in batcher.housekeeping.tasks)


async def test_plans_behind_one_with_a_cancelled_row_are_written_behind_the_rest_of_it(
    batcher: Batcher, redis: Redis
) -> None:
    await batcher.start_epoch()
    await join(batcher, redis)
    release = hold_replies(batcher)
    for name in ("gone", "keep"):
        await admit(redis, make_request(name))
    await redis.hset(KEYS.request("gone"), "cancel", "1")  # type: ignore[misc]
    async with asyncio.timeout(30):
        while not batcher.pending.sent:
            await batcher.turn()
        await admit(redis, make_request("next"))
        while len(batcher.pending.sent) < 2:
            await batcher.turn()
        await asyncio.sleep(0)
    release()
    await turns(batcher)
    started = [start.request.request_id for plan in await plans(redis) for start in plan.starts]
    assert started == ["keep", "next"]
    assert sorted(batcher.scheduler.sequences) == ["keep", "next"]
    assert await redis.hget(KEYS.request("gone"), "terminal") == b"cancelled"  # type: ignore[misc]


async def test_a_broker_that_has_lost_plans_it_had_taken_ends_the_epoch(
    batcher: Batcher, redis: Redis
) -> None:
    """Else the worker would miss what they granted."""
    await batcher.start_epoch()
    await join(batcher, redis)
    await admit(redis, make_request("r1"))
    await turns(batcher)
    [_, (last, _)] = await redis.xrange(KEYS.plans("w1"))
    await redis.xdel(KEYS.plans("w1"), last)
    await admit(redis, make_request("r2"))
    with pytest.raises(WritesLost, match="lost plans of worker w1"):
        await turns(batcher)


# --- actions ------------------------------------------------------------------------------------------------


async def test_a_broker_that_has_forgotten_the_scripts_learns_them_again(redis: Redis) -> None:
    done: list[Any] = []
    queue = ActionQueue(redis)
    call = batcher_scripts.dequeue(Keys("test"), {"r": "1-0"})
    one = ScriptAction(lambda: call, lambda reply: done.append(reply) or [])  # type: ignore[func-returns-value]
    queue.add(one)
    await run_all(queue)
    await redis.script_flush()
    queue.add(one)
    with pytest.raises(ResponseError, match="No matching script"):
        await run_all(queue)
    await run_all(queue)
    queue.close()
    assert done == [[1], [1]]


# --- inbox --------------------------------------------------------------------------------------------------


async def read(inbox: Inbox) -> None:
    inbox.read_ahead(50)
    await inbox.fill(waits=True)


async def test_entries_that_a_slice_leaves_come_with_the_next_and_are_not_done_before(redis: Redis) -> None:
    inbox = Inbox(redis)
    inbox.follow("s")
    ids = [(await redis.xadd("s", {"kind": str(number)})).decode() for number in range(3)]
    await read(inbox)
    await redis.xadd("s", {"kind": "later"})
    assert next(inbox.pop_entries(60.0)).data == b"0"
    assert list(inbox.pop_entries(0.0)) == [], "no time is left"
    assert inbox.done_id("s") == ids[1], "the next one"
    await read(inbox)
    assert [entry.data for entry in inbox.pop_entries(60.0)] == [b"1", b"2"], (
        "nothing is read before all is taken"
    )
    assert inbox.done_id("s") == ids[2]
    await read(inbox)
    assert [entry.data for entry in inbox.pop_entries(60.0)] == [b"later"]
    assert parse_stream_id(inbox.done_id("s")) > parse_stream_id(ids[2])


async def test_what_is_due_long_since_is_no_time_to_read_in(redis: Redis) -> None:
    """A housekeeping that hangs is due all the time; its batcher reads on."""
    inbox = Inbox(redis)
    inbox.follow("due")
    await redis.xadd("due", {"kind": "1"})
    inbox.read_ahead(-60_000)
    await inbox.fill(waits=True)
    assert [entry.data for entry in inbox.pop_entries(60.0)] == [b"1"]


# --- inbox parse --------------------------------------------------------------------------------------------

NOW_MS = 5000


@pytest.mark.parametrize(
    ("clock", "queued_ms"),
    [({b"clock": b"4000"}, 4000), ({}, NOW_MS), ({b"clock": b"9000"}, NOW_MS), ({b"clock": b"x"}, NOW_MS)],
)
def test_a_deadline_counts_from_what_the_pool_s_clock_showed(
    clock: dict[bytes, bytes], queued_ms: int
) -> None:
    """Not from the entry's id, which the broker's own clock makes; and never from the future."""
    request = make_request("r1")
    entry = StreamEntry("requests", "99999-0", {b"generate": encode(request), **clock})
    sequence = inbox.parse_sequence(entry, inbox.parse_queued_ms(entry, NOW_MS))
    assert sequence.deadline_ms == queued_ms + request.ttl_ms
