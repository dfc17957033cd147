"""The active batcher, turn by turn, against a real broker: lost replies, garbage, keys of another type.
ActionQueue: scripts are sent at once, whatever replies are due, and nothing is done out of order.
Recovery: what is committed is read, saved and resumed; every death counts once.
AdapterKeeper: adapters that were unloaded go once no live request has them.
Inbox: entries in order, handled in slices; how far a stream is done; when a time to live began.
Events of requests, from the batcher to the gateway that reads them; spans follow from them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import count
from typing import Any

import msgpack
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError

from api.admin.routes_fleet import read_timelines
from batcher import batcher_scripts, inbox, worker_registry
from batcher.actions import ActionQueue, ScriptAction
from batcher.housekeeping import LINGER_S, LOAD_TIMEOUT_S, AdapterKeeper, Housekeeping
from batcher.inbox import Inbox, StreamEntry
from batcher.lease import Lease, LeaseLost, WritesLost
from batcher.loop import Batcher
from batcher.scheduling.plan_builder import PendingPlan
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from batcher.timeline import TimelineWriter, spans_of
from common import tracing
from common.adapter_registry import change_registry, read_registry
from common.adapters import LEAVING, LOADING, READY, HeldAdapters, PoolAdapter
from common.broker.keys import Keys, parse_stream_id
from common.broker.lua import Reply, ScriptCall
from common.broker.pool_client import PoolClient
from common.messages.codec import decode, encode
from common.messages.events import Timeline, TimelineEvent
from common.messages.plan import Plan, Report, WorkerCapacity, WorkerDied
from common.messages.records import RECORD, unpack_records
from common.messages.request import Cancel
from common.metrics import catalogue
from common.settings.settings import Settings
from common.tracing import TraceSpan, ids_of, span_name
from tests.support.broker_state import (
    KEYS,
    admit,
    error_of,
    make_capacity,
    make_request,
    make_tokens,
    place,
    run_all,
    seal,
    start_worker,
    write_log,
)
from tests.support.fleet.simulated_pool import request


@pytest.fixture
async def batcher(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Batcher]:
    """One that waits for no entry: what its tests write is there before a turn."""
    monkeypatch.setattr(Housekeeping, "left_ms", 0)
    monkeypatch.setattr(Housekeeping, "wait_ms", 1)
    monkeypatch.setattr(worker_registry, "STALL_S", 60.0)  # the machine may stop us for a while
    batcher = await begin_epoch(redis)
    yield batcher
    batcher.close()


async def begin_epoch(redis: Redis) -> Batcher:
    pool = PoolClient(redis, KEYS)
    lease = Lease(pool, "b0-1", 60.0)
    return Batcher(Settings(), pool, lease, await lease.acquire())


async def turns(batcher: Batcher, most: int = 6) -> None:
    """Turns in which a read has come, and the housekeeping that each starts."""
    num_reads = 0
    while num_reads < most or batcher.pending.sent:
        await batcher.retry(batcher.turn)
        num_reads += batcher.inbox.reading is None
        if batcher.housekeeping.tasks:
            await asyncio.wait(batcher.housekeeping.tasks)


async def join(batcher: Batcher, redis: Redis, digest: str = "") -> None:
    """Start a worker with a model of this digest, and answer the takeover for it."""
    await start_worker(redis, "w1", encode(make_capacity("w1", model_digest=digest)))
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


@pytest.mark.parametrize(("why", "num_lost"), [("died", 1), ("drained", 0)])
async def test_a_worker_that_seals_its_own_logs_is_counted_as_lost_once(
    batcher: Batcher, redis: Redis, why: str, num_lost: int
) -> None:
    """Its launcher reports its death, too, before or after its seal has been read; and after that, before
    its removal, which waits for other long actions. One that was told to end, or lets another model have its
    turn, is not lost.
    """
    await batcher.start_epoch()
    await join(batcher, redis)
    lost = catalogue.WORKERS_LOST.values[()]
    await seal(redis, "w1", why)
    for _ in range(6):
        batcher.pending.defer(lambda: asyncio.sleep(0))
    for _ in range(4):
        await redis.xadd(KEYS.control, {"died": encode(WorkerDied("w1"))})
        await turns(batcher, 3)
    assert not batcher.pending.deferred
    assert "w1" not in batcher.scheduler.replicas
    assert catalogue.WORKERS_LOST.values[()] == lost + num_lost


@pytest.mark.parametrize("had_plans", [False, True])
async def test_a_worker_of_another_model_waits_until_no_worker_of_this_one_is_left(
    batcher: Batcher, redis: Redis, caplog: pytest.LogCaptureFixture, had_plans: bool
) -> None:
    """Also in the next epoch, in which it comes first: there it is sealed only if it may hold requests, as an
    earlier release gave it some. Other settings, and no known digest, are no other model.
    """
    await batcher.start_epoch()
    await join(batcher, redis, "ours")
    others: dict[str, dict[str, Any]] = {
        "other": {"model_digest": "theirs", "model_id": "org/other"},
        "changed": {"model_digest": "ours", "block_size": 32, "dtype": "bfloat16"},
        "old": {},
    }
    for name, fields in others.items():
        await start_worker(redis, name, encode(make_capacity(name, **fields)))
    await turns(batcher)

    async def have_plans() -> list[str]:
        names = ("w1", "other", "changed", "old")
        return [one for one in names if await redis.exists(KEYS.plans(one))]

    assert await have_plans() == ["w1", "changed", "old"]
    assert await redis.hget(KEYS.state, "refused") == b"other"  # type: ignore[misc]
    cause = (
        "worker other waits until no other is left: the files of its model (org/other) are not those of w1"
    )
    assert caplog.messages.count(cause) == 1
    if had_plans:
        await redis.xadd(KEYS.plans("other"), {"plan": b""}, id="1-1")
        await admit(redis, make_request("r1"))
        await place(redis, "r1", "other")
    await redis.zadd(KEYS.workers, {"w1" if had_plans else "other": 0})
    batcher.close()
    batcher = await begin_epoch(redis)
    await batcher.start_epoch()
    await turns(batcher)
    assert batcher.workers.refused == ([] if had_plans else ["other"])
    assert await redis.exists(KEYS.log("other")) == (not had_plans)
    for name in ("w1", "changed", "old"):
        await seal(redis, name, "drained")
    await turns(batcher)
    assert await have_plans() == ([] if had_plans else ["other"])
    assert await redis.hget(KEYS.state, "refused") == b""  # type: ignore[misc]
    batcher.close()


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


async def test_a_cancel_that_comes_in_one_read_with_its_request_ends_it(
    batcher: Batcher, redis: Redis
) -> None:
    await batcher.start_epoch()
    await admit(redis, make_request("r1"))
    await redis.xadd(KEYS.control, {"cancel": encode(Cancel("r1", "client"))})
    await turns(batcher)
    assert not batcher.scheduler.sequences
    assert await redis.hget(KEYS.request("r1"), "terminal") == b"cancelled"  # type: ignore[misc]


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


@pytest.mark.parametrize("digest", ["d", "other"])
@pytest.mark.parametrize("ends", ["in the batcher", "dequeued", "on a worker"])
async def test_an_id_that_comes_again_after_its_end_is_a_request_of_its_own(
    batcher: Batcher, redis: Redis, ends: str, digest: str
) -> None:
    """Whatever the batcher still has to do for the first one; another gateway may ask again."""
    again = replace(make_request("r1"), digest=digest, channel="other")
    await batcher.start_epoch()
    if ends == "on a worker":
        await join(batcher, redis)
    await admit(redis, make_request("r1"))
    await turns(batcher, 2)
    publish = batcher.recovery.publish

    async def ask_again() -> None:
        await redis.delete(KEYS.request("r1"))
        await admit(redis, again)

    async def publish_end(*args: Any) -> None:
        await publish(*args)
        await ask_again()

    if ends == "in the batcher":
        batcher.recovery.publish = publish_end  # type: ignore[method-assign, assignment]
        batcher.scheduler.cancel("r1", "timeout")
    elif ends == "dequeued":
        release = hold_replies(batcher)
        batcher.scheduler.cancel("r1", "timeout")
        async with asyncio.timeout(30):
            while await redis.xlen(KEYS.requests):
                await batcher.turn()
        await ask_again()
        [(last, _)] = await redis.xrange(KEYS.requests)
        while batcher.inbox.last_ids[KEYS.requests] != last.decode():
            await batcher.turn()
        release()
    else:
        await redis.xadd(
            KEYS.reports("w1"),
            {"report": encode(Report(2, batcher.epoch, 2, 5, ended=[(1, "nan", 3)], released=[(1, 3)]))},
            id="2-0",
        )
        await ask_again()
    await turns(batcher)
    [sequence] = batcher.scheduler.sequences.values()
    assert (sequence.request, sequence.stop_reason) == (again, "")
    assert sequence.waiting or sequence.row is not None
    assert await redis.xlen(KEYS.requests) == 1
    assert not await redis.hexists(KEYS.request("r1"), "terminal")  # type: ignore[misc]


# --- recovery ---------------------------------------------------------------------------------------------


async def queued(redis: Redis, request_id: str) -> Sequence:
    request = make_request(request_id)
    entry_id = await admit(redis, request)
    return Sequence(request, entry_id, 10**15)


async def placed(redis: Redis, request_id: str, incarnation: str = "w1") -> Sequence:
    """A request on a worker that has committed two tokens of it, of which one is spilled."""
    sequence = await queued(redis, request_id)
    await place(redis, request_id, incarnation)
    await redis.set(KEYS.tokens(request_id), RECORD.pack(7, -1.0))
    await write_log(redis, incarnation, make_tokens(request_id, 1, [8]))
    return sequence


async def test_a_request_whose_key_is_gone_has_ended(redis: Redis, batcher: Batcher) -> None:
    sequence = await queued(redis, "r1")
    await redis.delete(KEYS.request("r1"))
    assert await batcher.recovery.resume([sequence]) == []


async def test_a_batcher_of_an_earlier_epoch_ends_no_request(redis: Redis, batcher: Batcher) -> None:
    """The next one may have started it by the time that the broker hears of the end."""
    sequence = await queued(redis, "r1")
    await redis.incr(KEYS.epoch)
    with pytest.raises(LeaseLost):
        await batcher.recovery.finish(sequence, "no_worker")
    assert not await error_of(redis, "r1")


async def test_an_entry_that_is_no_request_is_removed_whatever_its_key_is(
    redis: Redis, batcher: Batcher
) -> None:
    await redis.set(KEYS.request("r1"), "another's")
    await redis.xadd(KEYS.requests, {"generate": msgpack.packb({"id": "r1"})})
    await batcher.start_epoch()
    await batcher.run_pending()
    assert not await redis.xlen(KEYS.requests)


async def test_sequences_change_only_after_everything_was_saved(redis: Redis, batcher: Batcher) -> None:
    await start_worker(redis, "w1")
    sequences = [await placed(redis, name) for name in ("r1", "r2")]
    calls = 0

    class LossyPool(PoolClient):
        async def run(self, call: ScriptCall[Reply]) -> Reply:
            """Lose the reply to the first call."""
            nonlocal calls
            calls += 1
            answer = await super().run(call)
            if calls == 1:
                raise ConnectionError("away")
            return answer

    batcher.recovery.pool = LossyPool(redis, KEYS)
    with pytest.raises(ConnectionError):
        await batcher.recovery.resume(sequences)
    assert [one.records for one in sequences] == [b""] * 2
    assert await batcher.recovery.resume(sequences) == sequences
    assert [one.base for one in sequences] == [2] * 2


async def test_a_request_that_no_worker_held_resumes_with_its_string(redis: Redis, batcher: Batcher) -> None:
    sequence = await queued(redis, "r1")
    await place(redis, "r1", "", attempt=2)
    await redis.set(KEYS.tokens("r1"), RECORD.pack(7, -1.0))
    sequence.attempt = 2
    await batcher.recovery.enqueue_unheld([sequence])
    assert (sequence.base, sequence.attempt, sequence.waiting) == (1, 2, True)


async def test_what_a_log_says_of_requests_that_the_worker_gave_up_is_saved(
    redis: Redis, batcher: Batcher
) -> None:
    """Of one that runs elsewhere by now, from the tokens of its string, and of one that has ended nothing is
    written.
    """
    await start_worker(redis, "w1")
    for name in ("given up", "elsewhere", "ended"):
        await placed(redis, name)
    await place(redis, "given up", "", attempt=1)
    await place(redis, "elsewhere", "w2", attempt=2, base=1)
    await redis.hset(KEYS.request("ended"), "terminal", "length")  # type: ignore[misc]
    await redis.delete(KEYS.tokens("ended"))
    await batcher.workers.seal("w1")
    await batcher.recovery.remove_worker("w1", [])
    assert unpack_records(await redis.get(KEYS.tokens("given up")))[0] == [7, 8]
    assert unpack_records(await redis.get(KEYS.tokens("elsewhere")))[0] == [7]
    assert await redis.hget(KEYS.request("elsewhere"), "worker") == b"w2"  # type: ignore[misc]
    assert await redis.exists(KEYS.tokens("ended")) == 0


# --- adapters -----------------------------------------------------------------------------------------------

SQL = PoolAdapter("sql", "/sql", "a" * 64)


@pytest.fixture
def keeper(redis: Redis) -> AdapterKeeper:
    return AdapterKeeper(PoolClient(redis, KEYS))


async def put(keeper: AdapterKeeper, state: str) -> None:
    await change_registry(keeper.pool, lambda found: found.put(replace(SQL, state=state)))


def scheduler(*adapters: str) -> Scheduler:
    """Make one whose requests, which wait, have these adapters."""
    made = Scheduler(WorkerLimits(), epoch=1)
    for i, adapter in enumerate(adapters):
        sequence = request(f"r{i}", 20, 4, i, adapter=adapter)
        made.register(sequence)
        made.enqueue(sequence)
    return made


def pass_time(keeper: AdapterKeeper, seconds: float) -> None:
    since = keeper.waiting
    since.since_s = {one: at_s - seconds for one, at_s in since.since_s.items()}


async def keys(keeper: AdapterKeeper) -> list[str]:
    return [*(await read_registry(keeper.pool)).adapters]


async def test_an_unloaded_adapter_goes_once_nobody_has_used_it_for_a_while(keeper: AdapterKeeper) -> None:
    await put(keeper, LEAVING)
    assert await keeper.look(scheduler(SQL.key), []) == []
    pass_time(keeper, 10 * LINGER_S)
    assert await keeper.look(scheduler(SQL.key), []) == []
    assert await keys(keeper) == [SQL.key], "a live request has it"
    await keeper.look(scheduler(), [])
    assert await keys(keeper) == [SQL.key], "a gateway may not know yet"
    pass_time(keeper, LINGER_S)
    await keeper.look(scheduler(), [])
    assert await keys(keeper) == []


async def test_an_adapter_whose_gateway_died_while_it_was_loaded_is_taken_back(keeper: AdapterKeeper) -> None:
    await put(keeper, LOADING)
    await keeper.look(scheduler(), [])
    pass_time(keeper, LOAD_TIMEOUT_S / 2)
    await keeper.look(scheduler(), [])
    assert await keys(keeper) == [SQL.key]
    pass_time(keeper, LOAD_TIMEOUT_S / 2)
    await keeper.look(scheduler(), [])
    assert await keys(keeper) == []


async def test_a_request_whose_adapter_no_worker_will_load_is_named(keeper: AdapterKeeper) -> None:
    await put(keeper, READY)
    for _ in range(2):  # one engine may have been killed by chance
        assert await keeper.look(scheduler(SQL.key), []) == []
        await change_registry(keeper.pool, lambda found: found.with_failure(SQL, "it ended an engine"))
    assert await keeper.look(scheduler(SQL.key, ""), []) == ["r0"]


async def test_a_request_ends_once_every_worker_refuses_its_adapter(redis: Redis, batcher: Batcher) -> None:
    await batcher.start_epoch()
    await put(AdapterKeeper(PoolClient(redis, KEYS)), READY)
    await admit(redis, replace(make_request("r1"), adapter=SQL.key))
    has, free = HeldAdapters([SQL.key]), HeldAdapters()
    earlier = HeldAdapters([], [(SQL.key, SQL.added_ms - 1, "its record was another one")])
    refuses = HeldAdapters([], [(SQL.key, SQL.added_ms, "its files are gone")])
    for worker in ("w1", "w2", "w3"):
        await start_worker(redis, worker)  # w3 serves no adapters
    for held, is_served in ((has, True), (free, True), (earlier, True), (refuses, False)):
        assert not await error_of(redis, "r1")
        for worker, adapters in (("w1", refuses), ("w2", held)):
            held_now = {"adapters": encode(adapters)}
            await redis.hset(KEYS.worker(worker), mapping=held_now)  # type: ignore[misc]
        await turns(batcher)
        assert (await error_of(redis, "r1") is None) == is_served


async def test_a_request_whose_adapter_is_gone_is_named(keeper: AdapterKeeper) -> None:
    await put(keeper, READY)
    assert await keeper.look(scheduler("", SQL.key, "other@1"), []) == ["r2"]


async def test_nothing_is_lost_with_the_registry(keeper: AdapterKeeper) -> None:
    assert await keeper.look(scheduler(SQL.key), []) == [], "a gateway writes it again"


# --- actions ------------------------------------------------------------------------------------------------


async def test_a_broker_that_has_forgotten_the_scripts_learns_them_again(redis: Redis) -> None:
    done: list[Any] = []
    queue = ActionQueue(redis)
    call = batcher_scripts.dequeue(Keys("test"), [("r", "1-0")])
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


async def fill(inbox: Inbox) -> None:
    inbox.read_ahead(50)
    await inbox.fill(waits=True)


async def test_entries_that_a_slice_leaves_come_with_the_next_and_are_not_done_before(redis: Redis) -> None:
    inbox = Inbox(redis)
    inbox.follow("s")
    ids = [(await redis.xadd("s", {"kind": str(number)})).decode() for number in range(3)]
    await fill(inbox)
    await redis.xadd("s", {"kind": "later"})
    assert next(inbox.pop_entries(60.0)).data == b"0"
    assert list(inbox.pop_entries(0.0)) == [], "no time is left"
    assert inbox.done_id("s") == ids[1], "the next one"
    await fill(inbox)
    assert [entry.data for entry in inbox.pop_entries(60.0)] == [b"1", b"2"], (
        "nothing is read before all is taken"
    )
    assert inbox.done_id("s") == ids[2]
    await fill(inbox)
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


# --- timeline -----------------------------------------------------------------------------------------------

CLOCK_MS = 1_000_000


def replica() -> Replica:
    return Replica(WorkerCapacity("w0-1", "w0", "m", "float32", 16, 100, 64, 2048), WorkerLimits())


def make_writer(redis: Redis) -> TimelineWriter:
    return TimelineWriter(PoolClient(redis, KEYS), lambda: CLOCK_MS)


WHAT_HAPPENED = ("what", "worker", "attempt", "num_tokens", "why")


async def test_a_timeline_from_queue_to_end(redis: Redis) -> None:
    writer, one, worker = make_writer(redis), request("r1", 3, 50), replica()
    writer.record_queued(one)
    row = worker.start(one)
    writer.record_plan(PendingPlan(worker, Plan(1, 2, 32, 64), [row]))
    writer.record_report(worker, Report(1, 1, 2, 1, prefilled=[(row.number, 3, 1)]))
    one.commit(b"\0" * RECORD.size * 37)
    writer.record_death("w0-1", [one], "died")
    row = worker.start(one)
    before = catalogue.BATCH_CONCAT.values["backpressure",]
    writer.record_plan(PendingPlan(worker, Plan(1, 3, 64, 64), [row], joins="backpressure"))
    assert catalogue.BATCH_CONCAT.values["backpressure",] == before + 1
    writer.record_report(
        worker, Report(2, 1, 3, 40, ended=[(row.number, "preempted", 41), (99, "length", 1)])
    )
    writer.record_report(worker, Report(3, 1, 3, 50, ended=[(row.number, "length", 50)]))
    await writer.write()
    happened = (await read_timelines(PoolClient(redis, KEYS), "r1"))["r1"]
    assert [tuple(one[name] for name in WHAT_HAPPENED) for one in happened] == [
        ("queued", "", 0, 3, ""),
        ("placed", "w0-1", 1, 0, ""),
        ("prefilled", "w0-1", 1, 1, ""),
        ("died", "w0-1", 1, 37, ""),
        ("placed", "w0-1", 2, 37, ""),
        ("interrupted", "w0-1", 2, 41, "preempted"),
        ("ended", "w0-1", 2, 50, "length"),
    ]
    assert await redis.pttl(KEYS.timeline) > 0


async def test_reading_goes_back_as_far_as_needed_and_skips_undecodable_fields(redis: Redis) -> None:
    def entry(name: str, *happenings: TimelineEvent) -> dict[Any, Any]:
        return {name: encode(Timeline(list(happenings)))}

    await redis.xadd(KEYS.timeline, entry("r1", TimelineEvent(1000, "ended")), id="1000-0")
    await redis.xadd(KEYS.timeline, entry("r1", TimelineEvent(20_000, "queued")), id="20000-0")
    await redis.xadd(KEYS.timeline, {"r1": b"garbage", b"\xff": b""}, id="20001-0")
    async with redis.pipeline() as pipe:
        for i in range(1200):
            pipe.xadd(KEYS.timeline, entry("other", TimelineEvent(30_000, "placed")), id=f"30000-{i}")
        await pipe.execute()
    await redis.xadd(KEYS.timeline, entry("r1", TimelineEvent(40_000, "ended")), id="40000-0")
    assert [one["at_ms"] for one in (await read_timelines(PoolClient(redis, KEYS), "r1"))["r1"]] == [
        1000,
        20_000,
        40_000,
    ]
    assert len((await read_timelines(PoolClient(redis, KEYS), "other"))["other"]) == 1200


# --- traces -------------------------------------------------------------------------------------------------

PARENT = span_name("ab" * 16, "cd" * 8)
TRACED = request("r1", 3, 50, traceparent=PARENT)


class Collector:
    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []

    def export(self, span: TraceSpan) -> None:
        self.spans.append(span)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Collector:
    collector = Collector()
    monkeypatch.setattr(tracing, "exporter", collector)
    return collector


def shown(spans: list[TraceSpan]) -> list[tuple[str, int, int, str]]:
    ms = 1_000_000
    return [(span.name, span.start_ns // ms, span.end_ns // ms, span.error) for span in spans]


QUEUED = TimelineEvent(0, "queued", num_tokens=3)
PLACED = TimelineEvent(10, "placed", "w0", 1)
FIRST = TimelineEvent(20, "prefilled", "w0", 1, 1)
DIED = TimelineEvent(50, "died", "w0", 1, 8)
PLACED_AGAIN = TimelineEvent(60, "placed", "w1", 2, 8)
GOES_ON = TimelineEvent(70, "prefilled", "w1", 2, 9)
END = TimelineEvent(90, "ended", "w1", 2, 20, "length")
UNSEEN = TimelineEvent(95, "ended")


def test_a_death_is_two_attempts_and_one_decode() -> None:
    spans = spans_of(TRACED.request, [QUEUED, PLACED, FIRST, DIED, PLACED_AGAIN, GOES_ON, END], UNSEEN)
    assert shown(spans) == [
        ("queued", 0, 10, ""),
        ("queued", 50, 60, ""),
        ("infer", 10, 50, "worker w0 died"),
        ("prefill", 10, 20, ""),
        ("infer", 60, 90, ""),
        ("prefill", 60, 70, ""),
        ("decode", 20, 90, ""),
    ]
    *_, first, _, second, prefill, decode = spans
    assert second.links == [first.traceparent]
    assert prefill.parent_id == ids_of(second.traceparent)[1]
    assert [event.name for event in decode.events] == ["first_token", "died", "resume"]
    assert decode.attributes["gen_ai.usage.output_tokens"] == 20
    assert len({span.traceparent for span in spans}) == len(spans)
    assert {span.parent_id for span in (first, second, decode)} == {"cd" * 8}


def test_what_was_never_written_follows_from_what_came_next() -> None:
    """A batcher may die before it writes its last events; the end may have no event at all."""
    spans = spans_of(TRACED.request, [QUEUED, FIRST], TimelineEvent(80, "ended"))
    assert shown(spans) == [
        ("queued", 0, 20, ""),
        ("infer", 20, 80, ""),
        ("prefill", 20, 20, ""),
        ("decode", 20, 80, ""),
    ]


async def test_a_new_batcher_exports_what_its_predecessor_recorded(
    redis: Redis, collector: Collector
) -> None:
    one = request("r1", 3, 50, traceparent=PARENT)
    former, later = (TimelineWriter(PoolClient(redis, KEYS), lambda: CLOCK_MS) for _ in range(2))
    former.record_queued(one)
    one.attempt = 1
    former.record(one, "placed", worker="w0", at_ms=CLOCK_MS + 1)
    await former.write()
    later.traces.note_former([one])
    later.record(one, "prefilled", worker="w0", num_tokens=1, at_ms=CLOCK_MS + 2)
    later.record(one, "ended", worker="w0", num_tokens=9, why="length", at_ms=CLOCK_MS + 3)
    later.record_dequeued(one)
    later.traces.export_ended()
    assert not collector.spans, "its beginning is not read yet"
    await later.traces.recall()
    assert later.is_due
    await later.write()
    assert [span.name for span in collector.spans] == ["queued", "infer", "prefill", "decode"]
    assert not later.traces.live
