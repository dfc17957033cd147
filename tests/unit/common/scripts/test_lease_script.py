"""The script of the batchers' lease."""

from redis.asyncio import Redis

from tests.support.scripts import KEYS, call


async def test_one_holder_has_the_lease_and_epochs_rise(redis: Redis) -> None:
    keys = [KEYS.batcher, KEYS.epoch, KEYS.clock]
    first = await call(redis, "lease", keys, ["b0", 5000, "", ""])
    assert first and await call(redis, "lease", keys, ["b1", 5000, "", ""]) == b""
    await redis.delete(KEYS.batcher)
    assert await call(redis, "lease", keys, ["b0", 5000, first, 7000]) == first, (
        "a lease that only expired is kept"
    )
    await redis.delete(KEYS.batcher)
    second = await call(redis, "lease", keys, ["b1", 5000, "", ""])
    assert int(second) > int(first)
    assert await call(redis, "lease", keys, ["b0", 5000, first, 7000]) == b""
    await redis.set(KEYS.epoch, 2**52)
    await redis.delete(KEYS.batcher)
    assert int(await call(redis, "lease", keys, ["b0", 5000, "", ""])) == 2**52 + 1
