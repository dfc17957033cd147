"""Committed state: the request's string and the log of its worker, read as one."""

from typing import Any

import pytest
from redis.asyncio import Redis

from common.broker import committed
from common.broker.committed import Committed, read
from common.broker.pool_client import PoolClient
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


def records(*ids: int) -> bytes:
    return b"".join(RECORD.pack(token_id, -1.0) for token_id in ids)


async def read_one(redis: Redis, request_id: str) -> Committed:
    return (await read(PoolClient(redis, KEYS), [request_id]))[request_id]


def ids(state: Committed) -> list[int]:
    return unpack_records(state.records, state.width)[0]


@pytest.mark.parametrize(
    ("index", "new", "expected"),
    [
        (0, [1, 2], [1, 2]),  # known already
        (0, [1, 2, 3], [1, 2, 3]),  # overlaps
        (2, [3, 4], [1, 2, 3, 4]),  # follows
        (3, [4], [1, 2]),  # a token before it is missing
        (1, [9], [1, 2]),  # what is committed is never replaced
    ],
)
def test_append_adds_what_follows(index: int, new: list[int], expected: list[int]) -> None:
    state = Committed(records=records(1, 2))
    state.append(make_tokens("r", index, new))
    assert ids(state) == expected


async def test_a_request_that_moves_while_it_is_read_is_read_again(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on w1 at the first look, and on w2, which has committed more, at the second."""
    for incarnation in ("w1", "w2"):
        await start_worker(redis, incarnation)
    await admit(redis, make_request("r1"))
    await place(redis, "r1", "w1")
    await write_log(redis, "w1", make_tokens("r1", 0, [1]))
    await write_log(redis, "w2", make_tokens("r1", 1, [2], attempt=2))
    read_slice, looks = committed.read_slice, []

    async def move_after_first(pool: PoolClient, *args: Any, **options: Any) -> Any:
        states = await read_slice(pool, *args, **options)
        looks.append(states["r1"].worker)
        if len(looks) == 1:
            await redis.set(KEYS.tokens("r1"), records(1))
            await place(redis, "r1", "w2", attempt=2, base=1)
        return states

    monkeypatch.setattr(committed, "read_slice", move_after_first)
    assert ids(await read_one(redis, "r1")) == [1, 2]
    assert looks == ["w1", "w2", "w2"]


async def test_what_is_spilled_between_two_reads_is_not_lost(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spill empties the log into the string, between the reads of both."""
    await start_worker(redis, "w1")
    await admit(redis, make_request("r1"))
    await place(redis, "r1", "w1")
    await redis.set(KEYS.tokens("r1"), records(1))
    await write_log(redis, "w1", make_tokens("r1", 1, [2, 3]))
    read_slice, xrange, reads = committed.read_slice, redis.xrange, [""]

    async def spill_after(answer: Any, what: str) -> Any:
        reads.append(what)
        if len(reads) == 3:
            await redis.append(KEYS.tokens("r1"), records(2, 3))
            await redis.delete(KEYS.log("w1"))
        return answer

    async def read_log(*args: Any) -> Any:
        return await spill_after(await xrange(*args), "log")

    async def read_strings(*args: Any, **options: Any) -> Any:
        return await spill_after(await read_slice(*args, **options), "strings")

    monkeypatch.setattr(redis, "xrange", read_log)
    monkeypatch.setattr(committed, "read_slice", read_strings)
    assert ids(await read_one(redis, "r1")) == [1, 2, 3]


async def test_the_log_of_an_ended_request_is_not_read(redis: Redis) -> None:
    await start_worker(redis, "w1")
    await admit(redis, make_request("r1"))
    await place(redis, "r1", "w1")
    await write_log(redis, "w1", make_tokens("r1", 0, [1]))
    await redis.hset(KEYS.request("r1"), "terminal", "length")  # type: ignore[misc]
    assert ids(await read_one(redis, "r1")) == []


async def test_a_key_of_another_type_spoils_its_own_request_only(redis: Redis) -> None:
    for request_id in ("spoiled", "good"):
        await admit(redis, make_request(request_id))
    await redis.delete(KEYS.request("spoiled"))
    await redis.set(KEYS.request("spoiled"), "x")
    await redis.rpush(KEYS.tokens("good"), "x")  # type: ignore[misc]
    states = await read(PoolClient(redis, KEYS), ["spoiled", "good"])
    assert [states[name].known for name in ("spoiled", "good")] == [False, True]
