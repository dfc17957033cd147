"""Scripts of answers that a client comes back for."""

from typing import Any

from redis.asyncio import Redis

from tests.support.scripts import KEYS, admit, call


async def attach(redis: Redis, keys: list[str], args: list[Any]) -> list[Any]:
    """Returns the answer without the digests, which are checked to be those of `admit`."""
    answer: list[Any] = await call(redis, "readers/attach", keys, args)
    assert answer.pop() == [b"d"] * len(keys)
    return answer


async def test_only_the_newest_reader_cancels_and_forgets(redis: Redis) -> None:
    await admit(redis, "r1")
    await admit(redis, "r2")
    both = [KEYS.request("r1"), KEYS.request("r2")]
    assert await attach(redis, both, ["g2"]) == [b"attached", 1]
    assert [await redis.hmget(key, ["reader", "gateway"]) for key in both] == [[b"1", b"g2"]] * 2  # type: ignore[misc]
    own = [KEYS.request("r1"), KEYS.tokens("r1")]
    assert await call(redis, "cancel", [KEYS.request("r1"), KEYS.control], [b"c", 0]) == 0
    assert await call(redis, "readers/forget", own, [0]) == 0
    assert await call(redis, "readers/forget", own, [1]) == 1
    assert await call(redis, "readers/attach", both, ["g3"]) == [b"gone"]
    assert await call(redis, "cancel", [KEYS.request("r2"), KEYS.control], [b"c", 1]) == 1
    assert await call(redis, "readers/attach", [KEYS.request("r2")], ["g3"]) == [b"cancelled"]


async def test_a_detached_request_has_no_gateway_whoever_reads(redis: Redis) -> None:
    await admit(redis, "r1")
    await redis.hset(KEYS.request("r1"), "gateway", "")  # type: ignore[misc]
    assert await attach(redis, [KEYS.request("r1")], ["g2"]) == [b"attached", 1]
    assert await redis.hget(KEYS.request("r1"), "gateway") == b""  # type: ignore[misc]


async def test_an_inherited_connection_yields_to_the_one_on_which_its_client_came_back(redis: Redis) -> None:
    """Heirs follow each other on one connection; one whose client has another is superseded."""
    await admit(redis, "r1")
    key = [KEYS.request("r1")]
    assert await attach(redis, key, ["g2", 0]) == [b"attached", 1]
    assert await attach(redis, key, ["g3", 0]) == [b"attached", 2]
    assert await attach(redis, key, ["g4", ""]) == [b"attached", 3]
    assert await call(redis, "readers/attach", key, ["g2", 0]) == [b"superseded"]
    assert await attach(redis, key, ["g2", 3]) == [b"attached", 4]
