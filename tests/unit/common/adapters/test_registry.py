"""The registry of adapters: what each change leaves, and that none of two changes at once is lost."""

import asyncio
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from common.adapter_registry import MAX_ADAPTERS, AdapterRegistry, change_registry, read_registry
from common.adapters import LOADING, READY, HeldAdapters, PoolAdapter, adapter_name
from common.broker.pool_client import ChangeRefused, PoolClient
from common.messages.codec import decode, encode
from tests.support.broker_state import KEYS

SQL, NEWER = PoolAdapter("sql", "/sql", "a" * 64), PoolAdapter("sql", "/newer", "b" * 64)
EMPTY = AdapterRegistry()


def test_a_registry_has_at_most_so_many_adapters() -> None:
    full = EMPTY
    for i in range(MAX_ADAPTERS):
        full = full.put(replace(SQL, name=f"a{i}"))
    with pytest.raises(ChangeRefused, match=f"there are {MAX_ADAPTERS} adapters, which is the most"):
        full.with_loading(SQL, in_place=False)
    assert full.forgetting(["a0@" + "a" * 16]).with_loading(SQL, in_place=False)


async def test_changes_at_once_are_all_kept_and_what_another_program_wrote_is_no_adapter(
    redis: Redis,
) -> None:
    pool = PoolClient(redis, KEYS)
    made = [replace(SQL, name=f"a{i}") for i in range(8)]

    async def put(adapter: PoolAdapter) -> None:
        await change_registry(pool, lambda found: found.put(adapter))

    await asyncio.gather(*map(put, made))
    await redis.hset(KEYS.adapters, "x@1", "nonsense")  # type: ignore[misc]
    found = await read_registry(pool)
    assert {*found.adapters} == {one.key for one in made}
    assert await change_registry(pool, lambda same: same) == found, "what changes nothing is not written"
    assert await redis.pttl(KEYS.adapters) > 0


def test_the_bytes_of_the_messages() -> None:
    adapter = PoolAdapter("sql", "/s", "ab", READY, 8, "m", 5)
    assert encode(adapter) == (
        b"\x89\xa1v\x01\xa1n\xa3sql\xa1p\xa2/s\xa1d\xa2ab\xa1s\xa5ready\xa1r\x08\xa1b\xa1m\xa1a\x05\xa1f\xa0"
    )
    held = HeldAdapters(["sql@1"], [("b@2", 7, "why")])
    assert decode(HeldAdapters, encode(held)) == held
    assert (adapter.key, adapter_name(adapter.key), adapter_name("")) == ("sql@ab", "sql", "")
    assert PoolAdapter("a", "b", "c").state == LOADING
