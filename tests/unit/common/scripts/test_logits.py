"""Logits in the broker: one attempt's, whole and in order, or none; and what of them may be live at once."""

from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from common.broker.lua import run_script
from common.messages.codec import encode
from common.messages.records import pack_ids
from common.messages.request import Generate, LogitsParams, StoppingParams
from gpu_worker import worker_scripts
from tests.support.scripts import KEYS, REQUEST, admit, admit_request, create_logs, dequeue, seal

ROW = b"01234567"


async def write(redis: Redis, place: int, values: bytes, attempt: int = 1, worker: str = "w1") -> int | str:
    call = worker_scripts.write_logits(
        KEYS,
        worker,
        "r1",
        attempt=attempt,
        base=0,
        place=place,
        num_rows=len(values) // len(ROW),
        values=values,
        ttl_ms=60_000,
    )
    return await run_script(redis, call)


async def start(redis: Redis, attempt: int = 1, worker: str = "w1") -> None:
    await create_logs(redis, worker, worker)
    fields: dict[Any, Any] = {"digest": "d", "worker": worker, "attempt": attempt}
    await redis.hset(KEYS.request("r1"), mapping=fields)  # type: ignore[misc]


async def test_nothing_is_written_for_a_request_that_is_gone_or_by_a_sealed_worker(redis: Redis) -> None:
    await start(redis)
    await redis.hset(KEYS.request("r1"), "terminal", "length")  # type: ignore[misc]
    assert await write(redis, 0, ROW) == worker_scripts.LOGITS_REFUSED
    await redis.delete(KEYS.request("r1"))
    assert await write(redis, 0, ROW) == worker_scripts.LOGITS_REFUSED
    await start(redis)
    assert await seal(redis)
    assert (await write(redis, 0, ROW), await write(redis, 0, ROW, worker="w9")) == ("SEALED", "MISSING")
    assert not await redis.exists(KEYS.logits("r1"))


# --- places -------------------------------------------------------------------------------------------------


def returning(name: str, num_rows: int) -> Generate:
    """A request that returns so many rows of 40 bytes."""
    return replace(
        REQUEST,
        request_id=name,
        prompt_ids=pack_ids([1]),
        stopping=StoppingParams(num_rows),
        logits=LogitsParams(False, True, "float32", 10),
    )


async def ask(redis: Redis, request: Generate) -> str:
    return (await admit_request(redis, request, encode(request), max_count=10, max_bytes=2000)).outcome


async def test_the_logits_of_live_requests_have_a_limit(redis: Redis) -> None:
    """One request is taken in any case; requests without logits do not wait for those with."""
    assert await ask(redis, returning("r1", 60)) == "admitted"
    assert await ask(redis, returning("r2", 1)) == "bytes"
    assert (await admit(redis, "r3", max_count=9, max_bytes=2000)).outcome == "admitted"
    entry_id = await redis.hget(KEYS.request("r1"), "entry")  # type: ignore[misc]
    await redis.hset(KEYS.request("r1"), "terminal", "length")  # type: ignore[misc]
    assert await dequeue(redis, "r1", entry_id)
    assert [await ask(redis, returning(f"s{i}", 25)) for i in range(3)] == ["admitted", "admitted", "bytes"]
    await redis.delete(KEYS.places)  # they are counted anew
    assert await ask(redis, returning("s3", 25)) == "bytes"
