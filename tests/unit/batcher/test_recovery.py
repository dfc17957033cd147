"""Recovery: what is committed is read, saved and resumed; who holds a request from before is sealed first."""

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from batcher.dispatch import Dispatch
from batcher.failure_detector import FailureDetector
from batcher.inbox import Inbox
from batcher.recovery import Recovery, count_crashes
from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from batcher.terminals import Terminals
from batcher.timeline import TimelineWriter
from batcher.workers import KnownWorker, WorkerRegistry, WorkerState
from common.broker.committed import Committed
from common.broker.keys import SEALED
from common.broker.sequences import ChannelSequences
from common.messages.codec import encode
from common.messages.records import RECORD, unpack_records
from tests.support.broker_state import (
    KEYS,
    admit,
    make_request,
    make_tokens,
    place,
    start_worker,
    write_log,
)


@pytest.fixture
def recovery(redis: Redis) -> Recovery:
    scheduler = Scheduler(WorkerLimits(), epoch=1)
    timeline = TimelineWriter(redis, KEYS, lambda: 1000)
    terminals = Terminals(redis, KEYS, ChannelSequences("b0-1"), scheduler, timeline)
    detector = FailureDetector(5.0)
    workers = WorkerRegistry(redis, KEYS, Inbox(redis), Dispatch(redis, KEYS), scheduler, detector)
    return Recovery(redis, KEYS, scheduler, workers, terminals, timeline)


async def queue(redis: Redis, request_id: str) -> Sequence:
    request = make_request(request_id)
    entry_id = await admit(redis, request)
    return Sequence(request, entry_id, len(encode(request)), 10**15)


async def placed(redis: Redis, request_id: str, incarnation: str = "w1") -> Sequence:
    """A request on a worker that has committed two tokens of it, of which one is spilled."""
    sequence = await queue(redis, request_id)
    await place(redis, request_id, incarnation)
    await redis.set(KEYS.tokens(request_id), RECORD.pack(7, -1.0))
    await write_log(redis, incarnation, make_tokens(request_id, 1, [8]))
    return sequence


async def is_sealed(redis: Redis, incarnation: str) -> bool:
    last_id: bytes = (await redis.xrange(KEYS.log(incarnation)))[-1][0]
    return last_id == SEALED.encode()


async def test_resume_enqueues_with_all_committed_tokens(redis: Redis, recovery: Recovery) -> None:
    await start_worker(redis, "w1")
    sequence = await placed(redis, "r1")
    recovery.scheduler.register(sequence)
    assert await recovery.resume([sequence]) == [sequence]
    assert unpack_records(sequence.records)[0] == [7, 8]
    assert (sequence.attempt, sequence.waiting) == (1, True)


async def test_resume_saves_what_only_the_log_has(redis: Redis, recovery: Recovery) -> None:
    await start_worker(redis, "w1")
    sequence = await placed(redis, "r1")
    for _ in range(2):
        await recovery.resume([sequence])
    assert unpack_records(await redis.get(KEYS.tokens("r1")))[0] == [7, 8]


async def test_resume_dequeues_what_has_its_terminal(redis: Redis, recovery: Recovery) -> None:
    live, ended = [await queue(redis, name) for name in ("live", "ended")]
    for sequence in (live, ended):
        recovery.scheduler.register(sequence)
    await redis.hset(KEYS.request("ended"), "terminal", "length")  # type: ignore[misc]
    assert await recovery.resume([live, ended]) == [live]
    assert list(recovery.scheduler.sequences) == ["live"]
    assert await redis.xlen(KEYS.requests) == 1


async def test_a_request_whose_key_is_gone_has_ended(redis: Redis, recovery: Recovery) -> None:
    sequence = await queue(redis, "r1")
    await redis.delete(KEYS.request("r1"))
    assert await recovery.resume([sequence]) == []


async def test_sequences_change_only_after_everything_was_saved(redis: Redis, recovery: Recovery) -> None:
    await start_worker(redis, "w1")
    sequences = [await placed(redis, name) for name in ("r1", "r2")]
    for sequence in sequences:
        sequence.suspect = True
    save, calls = recovery.save_script, 0

    async def fail_second(**kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ConnectionError("away")
        return await save(**kwargs)

    recovery.save_script = fail_second
    with pytest.raises(ConnectionError):
        await recovery.resume(sequences)
    assert [(one.records, one.suspect) for one in sequences] == [(b"", True)] * 2
    assert len(await recovery.resume(sequences)) == 2
    assert [one.suspect for one in sequences] == [False] * 2


@pytest.mark.parametrize(
    ("num_tokens", "base", "attempt", "suspect", "crash_count"),
    [
        (5, 5, 1, True, 2),  # nothing new was committed: one more crash
        (5, 5, 1, False, 1),  # the worker did not die under it
        (6, 5, 1, True, 0),  # a token beyond the base clears it
        (5, 5, 0, True, 4),  # from before this epoch: the count in Redis holds
    ],
)
def test_crashes_count_until_a_token_is_committed(
    num_tokens: int, base: int, attempt: int, suspect: bool, crash_count: int
) -> None:
    sequence = Sequence(make_request("r1"), "1-0", 1, 1, attempt=attempt, crash_count=1, suspect=suspect)
    state = Committed(base=base, crash_count=3, records=RECORD.pack(1, 0.0) * num_tokens)
    assert count_crashes(sequence, state) == crash_count


async def test_the_crash_count_is_saved_with_the_request(redis: Redis, recovery: Recovery) -> None:
    sequence = await queue(redis, "r1")
    sequence.suspect = True
    await recovery.resume([sequence])
    assert sequence.crash_count == 1
    assert await redis.hget(KEYS.request("r1"), "crash_count") == b"1"  # type: ignore[misc]


async def test_restore_seals_a_holder_that_did_not_answer(redis: Redis, recovery: Recovery) -> None:
    await start_worker(redis, "w1")
    sequence = await placed(redis, "r1")
    await recovery.restore(sequence)
    assert await is_sealed(redis, "w1")
    assert recovery.scheduler.sequences == {"r1": sequence} and sequence.waiting
    assert [event.what for event in recovery.timeline.unwritten["r1"]] == ["taken_over"]


@pytest.mark.parametrize("state", [WorkerState.ACTIVE, WorkerState.REMOVED])
async def test_restore_leaves_a_worker_that_was_taken_over(
    redis: Redis, recovery: Recovery, state: WorkerState
) -> None:
    await start_worker(redis, "w1")
    recovery.workers.workers["w1"] = KnownWorker(state)
    await recovery.restore(await placed(redis, "r1"))
    assert not await is_sealed(redis, "w1")


async def test_restore_leaves_the_worker_of_an_ended_request(redis: Redis, recovery: Recovery) -> None:
    await start_worker(redis, "w1")
    sequence = await placed(redis, "r1")
    await redis.hset(KEYS.request("r1"), "terminal", "length")  # type: ignore[misc]
    await recovery.restore(sequence)
    assert not await is_sealed(redis, "w1")
    assert recovery.scheduler.sequences == {}


async def test_a_removed_worker_leaves_no_keys_and_its_requests_resume(
    redis: Redis, recovery: Recovery
) -> None:
    await start_worker(redis, "w1")
    sequence = await placed(redis, "r1")
    await recovery.workers.seal("w1")
    await recovery.remove_worker("w1", [sequence])
    assert await redis.exists(KEYS.log("w1"), KEYS.reports("w1"), KEYS.plans("w1"), KEYS.worker("w1")) == 0
    assert unpack_records(await redis.get(KEYS.tokens("r1")))[0] == [7, 8]
    assert sequence.waiting and recovery.workers.state("w1") is WorkerState.REMOVED
    assert [event.what for event in recovery.timeline.unwritten["r1"]] == ["died"]
