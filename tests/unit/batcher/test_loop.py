"""The active batcher, turn by turn, against the real broker: lost replies, strange words, keys that somebody
else wrote.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from api.admin import timeline
from batcher.lease import Lease
from batcher.loop import Batcher
from common.broker import client as brokers
from common.broker.keys import Keys
from common.messages.codec import decode, encode
from common.messages.packing import pack_ids
from common.messages.plan import Plan, Report, WorkerCapacity, WorkerDied
from common.messages.request import Cancel, Generate, StoppingParams
from common.metrics import catalogue
from common.settings.settings import Settings

KEYS = Keys("default")


@pytest.fixture
async def batcher(redis: Any) -> AsyncIterator[Batcher]:
    lease = Lease(redis, KEYS, "b0-1", 60.0)
    yield Batcher(Settings(), redis, KEYS, lease, await lease.acquire())


async def turns(batcher: Batcher, count: int = 6) -> None:
    for _ in range(count):
        await batcher.retry(batcher.turn)


async def admit(redis: Any, name: str) -> None:
    request = Generate(name, "d", pack_ids([1] * 4), StoppingParams(20), gateway="")
    keys = [KEYS.requests, KEYS.requests_bytes, KEYS.request(name)]
    await brokers.script(redis, "admit")(
        keys=keys, args=[encode(request), 100, 10**9, "d", "", "", 660_000, 1]
    )


async def open_worker(redis: Any, name: str, capacity: bytes | None = None) -> None:
    keys = [
        KEYS.worker(name),
        KEYS.workers,
        KEYS.log(name),
        KEYS.reports(name),
        KEYS.plans(name),
        KEYS.control,
    ]
    await brokers.script(redis, "create_logs")(
        keys=[KEYS.log(name), KEYS.reports(name)], args=[name, 3_600_000]
    )
    capacity = capacity or encode(WorkerCapacity(name, "w0", "m", "float32", 16, 30, 512, 8192))
    await brokers.script(redis, "worker_heartbeat")(
        keys=keys, args=[name, 600_000, 3_600_000, "ready", 0, capacity]
    )


async def join(batcher: Batcher, redis: Any, name: str = "w1") -> None:
    """A worker that has answered the takeover."""
    await open_worker(redis, name)
    await turns(batcher, 2)
    await redis.xadd(
        KEYS.reports(name), {"report": encode(Report(1, batcher.epoch, 1, 0, takeover=True))}, id="1-0"
    )
    await turns(batcher, 2)
    assert name in batcher.scheduler.replicas


async def plans(redis: Any, name: str = "w1") -> list[Plan]:
    return [decode(Plan, fields[b"plan"]) for _, fields in await redis.xrange(KEYS.plans(name))]


def lose_reply(batcher: Batcher, number: int) -> None:
    """The connection is cut after hand-over `number` was done and before its reply came."""
    real, calls = batcher.dispatch.script, 0

    async def flaky(**words: Any) -> Any:
        nonlocal calls
        answer = await real(**words)
        calls += 1
        if calls == number:
            raise ConnectionError("cut")
        return answer

    batcher.dispatch.script = flaky


async def test_what_waited_before_this_epoch_is_told_of_once(batcher: Any, redis: Any) -> None:
    await admit(redis, "r1")
    await batcher.start_epoch()
    await turns(batcher)
    batcher.timeline.written_s = 0.0
    await batcher.timeline.write()
    assert [happening["what"] for happening in (await timeline.read_timelines(redis, KEYS, "r1"))["r1"]] == [
        "queued"
    ]


async def test_a_worker_that_seals_its_own_logs_is_lost_once(batcher: Any, redis: Any) -> None:
    """Whoever started it says that it died, too, before or after its seal has been read."""
    await batcher.start_epoch()
    await join(batcher, redis)
    lost = catalogue.WORKERS_LOST.values[()]
    keys = [KEYS.log("w1"), KEYS.reports("w1"), KEYS.worker("w1"), KEYS.workers]
    await brokers.script(redis, "seal")(keys=keys, args=["w1"])
    for _ in range(2):
        await redis.xadd(KEYS.control, {"died": encode(WorkerDied("w1"))})
        await turns(batcher, 3)
    assert "w1" not in batcher.scheduler.replicas
    assert catalogue.WORKERS_LOST.values[()] == lost + 1


@pytest.mark.parametrize("lost", [1, 2])
async def test_a_lost_reply_loses_no_refused_row(batcher: Any, redis: Any, lost: Any) -> None:
    await batcher.start_epoch()
    await join(batcher, redis)
    await admit(redis, "keep")
    await admit(redis, "gone")
    await redis.hset(KEYS.request("gone"), "cancel", 1)
    lose_reply(batcher, lost)
    await turns(batcher)
    assert [row.sequence.request_id for row in batcher.scheduler.replicas["w1"].rows.values()] == ["keep"]
    assert [start.request.request_id for plan in await plans(redis) for start in plan.starts] == ["keep"]
    assert list(batcher.scheduler.sequences) == ["keep"]
    assert await redis.hget(KEYS.request("gone"), "terminal") == b"cancelled"
    assert await redis.xlen(KEYS.requests) == 1


async def test_nothing_said_between_two_reads_is_missed(batcher: Any, redis: Any) -> None:
    await batcher.start_epoch()
    await redis.xadd(KEYS.control, {"cancel": encode(Cancel("r1", "client"))})
    assert [entry.kind for entry in await batcher.inbox.read(50)] == ["cancel"]


async def test_a_hello_that_is_no_name_is_counted(batcher: Any, redis: Any) -> None:
    await batcher.start_epoch()
    await redis.xadd(KEYS.control, {"worker_ready": b"\xff\xfe"})
    await turns(batcher)
    assert batcher.undecodable == 1


async def test_an_earlier_worker_that_cannot_be_read_holds_nobody_up(batcher: Any, redis: Any) -> None:
    await open_worker(redis, "w1", b"junk")
    await admit(redis, "r1")
    await batcher.start_epoch()
    batcher.detector.resumes_s = 0.0
    await turns(batcher, 12)
    assert "r1" in batcher.scheduler.sequences
    assert await redis.exists(KEYS.worker("w1"), KEYS.log("w1")) == 0


async def test_a_key_of_another_type_spoils_its_own_request_only(batcher: Any, redis: Any) -> None:
    await batcher.start_epoch()
    for name in ("bad", "good"):
        await admit(redis, name)
    await redis.delete(KEYS.request("bad"))
    await redis.set(KEYS.request("bad"), "x")
    await redis.lpush(KEYS.tokens("good"), "x")
    await join(batcher, redis)
    await turns(batcher)
    assert [start.request.request_id for plan in await plans(redis) for start in plan.starts] == ["good"]
    assert list(batcher.scheduler.sequences) == ["good"]


async def test_a_worker_that_dies_is_read_to_its_end(batcher: Any, redis: Any) -> None:
    await batcher.start_epoch()
    await join(batcher, redis)
    await admit(redis, "r1")
    await turns(batcher, 2)
    await redis.xadd(
        KEYS.reports("w1"),
        {"report": encode(Report(2, batcher.epoch, 2, 5, ended=[(1, "length", 20)]))},
        id="2-0",
    )
    await batcher.seal("w1", "test")
    await turns(batcher)
    assert not batcher.scheduler.sequences, "it had ended before the seal"
    assert await redis.xlen(KEYS.requests) == 0
    assert await redis.exists(KEYS.log("w1"), KEYS.reports("w1"), KEYS.plans("w1")) == 0


async def test_who_was_stopped_blames_nobody(batcher: Any, redis: Any) -> None:
    await batcher.start_epoch()
    await join(batcher, redis)
    await redis.delete(KEYS.worker("w1"))
    batcher.detector.resumes_s = 0.0
    batcher.detector.checked_s -= 10
    assert await batcher.workers.check() == []
    batcher.detector.resumes_s = 0.0
    assert await batcher.workers.check() == ["w1"]


async def test_a_clock_that_jumps_gives_everybody_time(batcher: Any, redis: Any) -> None:
    batcher.detector.resumes_s = 0.0
    batcher.detector.check_clock_jump(1_000_000)
    assert batcher.detector.active
    batcher.detector.check_clock_jump(1_010_000)
    assert not batcher.detector.active
