"""The directory: what batchers write and gateways read."""

from redis.asyncio import Redis

from common.broker.directory import SILENT_S, TTL_S, DirectoryClient, PoolEntry
from common.broker.keys import Keys

ENTRY = PoolEntry("redis://a:6379", ["mine"], "org/mine", "", 2, 0, 3, 4, 512)


async def age(redis: Redis, pool: str, seconds: float) -> None:
    await redis.zincrby(Keys.pools, -seconds, pool)


async def test_a_pool_is_read_as_it_was_written(redis: Redis) -> None:
    directory = DirectoryClient(redis)
    assert await directory.publish("a", ENTRY) == ""
    content = await directory.read()
    assert content.pools["a"].entry == ENTRY and content.pools["a"].is_live
    assert ENTRY.depth == 7 / 512


async def test_a_silent_pool_is_not_live_and_leaves_after_an_hour(redis: Redis) -> None:
    directory = DirectoryClient(redis)
    await directory.publish("a", ENTRY)
    await age(redis, "a", SILENT_S + 1)
    assert not (await directory.read()).pools["a"].is_live
    await age(redis, "a", TTL_S)
    await directory.publish("b", ENTRY)
    assert (await directory.read()).pools.keys() == {"b"}
    assert await redis.hkeys(Keys.pool_entries) == [b"b"]  # type: ignore[misc]


async def test_a_name_belongs_to_one_broker_until_that_one_is_silent(redis: Redis) -> None:
    directory = DirectoryClient(redis)
    other = PoolEntry("redis://b:6379")
    await directory.publish("a", ENTRY)
    assert await directory.publish("a", other) == ENTRY.address
    assert (await directory.read()).pools["a"].entry == ENTRY
    await age(redis, "a", SILENT_S + 1)
    assert await directory.publish("a", other) == ""
    assert (await directory.read()).pools["a"].entry == other


async def test_what_cannot_be_read_is_left_out(redis: Redis) -> None:
    directory = DirectoryClient(redis)
    await directory.publish("a", ENTRY)
    await redis.zadd(Keys.pools, {"old": 1, "broken": 1})
    await redis.hset(Keys.pool_entries, mapping={"broken": b"?"})  # type: ignore[misc]
    await redis.hset(Keys.model_shares, mapping={"broken": b"?"})  # type: ignore[misc]
    await directory.set_weights("mine", {"a": 9, "b": 0.5})
    content = await directory.read()
    assert content.pools.keys() == {"a"} and content.weights == {"mine": {"a": 9, "b": 0.5}}
    await directory.set_weights("mine", {})
    assert (await directory.read()).weights == {}
