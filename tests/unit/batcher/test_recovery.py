"""Recovery: what is committed is read, saved and resumed; every death counts once.

AdapterKeeper: adapters that were unloaded go once no live request has them.
"""

from dataclasses import replace

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from batcher.actions import ActionQueue
from batcher.housekeeping import LINGER_S, LOAD_TIMEOUT_S, AdapterKeeper
from batcher.inbox import Inbox
from batcher.recovery import Recovery
from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from batcher.timeline import TimelineWriter
from batcher.worker_registry import FailureDetector, WorkerRegistry
from common.adapter_registry import change_registry, read_registry
from common.adapters import LEAVING, LOADING, READY, PoolAdapter
from common.broker.lua import Reply, ScriptCall
from common.broker.pool_client import PoolClient
from common.messages.events import ChannelSequences
from common.messages.records import RECORD, unpack_records
from tests.support.broker_state import KEYS, admit, make_request, make_tokens, place, start_worker, write_log
from tests.support.fleet.simulated_pool import request

# --- recovery -----------------------------------------------------------------------------------------------


@pytest.fixture
def recovery(redis: Redis) -> Recovery:
    scheduler = Scheduler(WorkerLimits(), epoch=1)
    pool = PoolClient(redis, KEYS)
    timeline = TimelineWriter(pool, lambda: 1000)
    detector = FailureDetector(5.0)
    workers = WorkerRegistry(pool, Inbox(redis), scheduler, detector)
    return Recovery(
        pool=pool,
        pending=ActionQueue(redis),
        scheduler=scheduler,
        workers=workers,
        channels=ChannelSequences("b0-1"),
        timeline=timeline,
    )


async def queue(redis: Redis, request_id: str) -> Sequence:
    request = make_request(request_id)
    entry_id = await admit(redis, request)
    return Sequence(request, entry_id, 10**15)


async def placed(redis: Redis, request_id: str, incarnation: str = "w1") -> Sequence:
    """A request on a worker that has committed two tokens of it, of which one is spilled."""
    sequence = await queue(redis, request_id)
    await place(redis, request_id, incarnation)
    await redis.set(KEYS.tokens(request_id), RECORD.pack(7, -1.0))
    await write_log(redis, incarnation, make_tokens(request_id, 1, [8]))
    return sequence


async def test_a_request_whose_key_is_gone_has_ended(redis: Redis, recovery: Recovery) -> None:
    sequence = await queue(redis, "r1")
    await redis.delete(KEYS.request("r1"))
    assert await recovery.resume([sequence]) == []


async def test_sequences_change_only_after_everything_was_saved(redis: Redis, recovery: Recovery) -> None:
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

    recovery.pool = LossyPool(redis, KEYS)
    with pytest.raises(ConnectionError):
        await recovery.resume(sequences)
    assert [one.records for one in sequences] == [b""] * 2
    assert await recovery.resume(sequences) == sequences
    assert [one.base for one in sequences] == [2] * 2


async def test_a_request_that_no_worker_held_resumes_with_its_string(
    redis: Redis, recovery: Recovery
) -> None:
    sequence = await queue(redis, "r1")
    await place(redis, "r1", "", attempt=2)
    await redis.set(KEYS.tokens("r1"), RECORD.pack(7, -1.0))
    sequence.attempt = 2
    await recovery.enqueue_unheld([sequence])
    assert (sequence.base, sequence.attempt, sequence.waiting) == (1, 2, True)


async def test_what_a_log_says_of_requests_that_the_worker_gave_up_is_saved(
    redis: Redis, recovery: Recovery
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
    await recovery.workers.seal("w1")
    await recovery.remove_worker("w1", [])
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
        sequence = request(f"r{i}", 20, 4, i)
        sequence.request = replace(sequence.request, adapter=adapter)
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
    assert await keeper.look(scheduler(SQL.key)) == []
    pass_time(keeper, 10 * LINGER_S)
    assert await keeper.look(scheduler(SQL.key)) == []
    assert await keys(keeper) == [SQL.key], "a live request has it"
    await keeper.look(scheduler())
    assert await keys(keeper) == [SQL.key], "a gateway may not know yet"
    pass_time(keeper, LINGER_S)
    await keeper.look(scheduler())
    assert await keys(keeper) == []


async def test_an_adapter_whose_gateway_died_while_it_was_loaded_is_taken_back(keeper: AdapterKeeper) -> None:
    await put(keeper, LOADING)
    await keeper.look(scheduler())
    pass_time(keeper, LOAD_TIMEOUT_S / 2)
    await keeper.look(scheduler())
    assert await keys(keeper) == [SQL.key]
    pass_time(keeper, LOAD_TIMEOUT_S / 2)
    await keeper.look(scheduler())
    assert await keys(keeper) == []


async def test_a_request_whose_adapter_no_worker_will_load_is_named(keeper: AdapterKeeper) -> None:
    await put(keeper, READY)
    assert await keeper.look(scheduler(SQL.key)) == []
    await change_registry(keeper.pool, lambda found: found.with_failure(SQL, "it ended an engine"))
    assert await keeper.look(scheduler(SQL.key, "")) == ["r0"]


async def test_a_request_whose_adapter_is_gone_is_named(keeper: AdapterKeeper) -> None:
    await put(keeper, READY)
    assert await keeper.look(scheduler("", SQL.key, "other@1")) == ["r2"]


async def test_nothing_is_lost_with_the_registry(keeper: AdapterKeeper) -> None:
    assert await keeper.look(scheduler(SQL.key)) == [], "a gateway writes it again"
