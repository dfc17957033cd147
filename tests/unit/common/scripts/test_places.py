"""Admission: room for each class and tenant, and places that come back whatever dies."""

from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from api.requests import request_scripts
from api.requests.request_scripts import AdmitReply
from batcher import batcher_scripts
from common.broker.lua import run_script
from common.messages.records import pack_ids
from common.messages.request import Generate
from tests.support.scripts import KEYS, REQUEST, dequeue

LIMIT = 10


async def ask(
    redis: Redis,
    name: str,
    class_name: str = "standard",
    tenant: str = "",
    weight: float = 1.0,
    tokens: int = 5,
    limit: int = LIMIT,
) -> str:
    """`admitted`, or why not."""
    request = replace(
        REQUEST, request_id=name, prompt_ids=pack_ids([1] * tokens), class_name=class_name, tenant=tenant
    )
    return (await admit(redis, request, weight, limit)).outcome


async def admit(redis: Redis, request: Generate, weight: float = 1.0, limit: int = LIMIT) -> AdmitReply:
    call = request_scripts.admit(
        KEYS,
        request,
        payload=b"x" * 10,
        answer=b"",
        weight=weight,
        max_requests=limit,
        max_bytes=10**6,
    )
    return await run_script(redis, call)


async def fill(redis: Redis, name: str, count: int, **terms: Any) -> int:
    """How many of so many are admitted."""
    return [await ask(redis, f"{name}{i}", **terms) for i in range(count)].count("admitted")


async def end(redis: Redis, name: str) -> None:
    entry_id = await redis.hget(KEYS.request(name), "entry")  # type: ignore[misc]
    await redis.hset(KEYS.request(name), "terminal", "length")  # type: ignore[misc]
    for _ in range(2):
        assert await dequeue(redis, name, entry_id)


async def test_one_call_returns_the_places_of_all_that_have_ended(redis: Redis) -> None:
    """Of two tenants and two classes. One has not ended, and one was removed before."""
    queued = {}
    for name, tenant, class_name in (("1", "a", ""), ("2", "a", ""), ("3", "b", ""), ("4", "b", "batch")):
        request = replace(REQUEST, request_id=name, tenant=tenant, class_name=class_name or "standard")
        queued[name] = (await admit(redis, request)).entry_id
        if name != "2":
            await redis.hset(KEYS.request(name), "terminal", "length")  # type: ignore[misc]
    assert await dequeue(redis, "1", queued["1"])
    assert await run_script(redis, batcher_scripts.dequeue(KEYS, queued)) == [1, 0, 1, 1]
    places = await redis.hgetall(KEYS.places)  # type: ignore[misc]
    counts = [
        int(places[name]) for name in (b"all", b"requests:standard", b"bytes:standard", b"requests:batch")
    ]
    assert counts == [1, 1, 10, 0]
    assert places[b"tenant:standard:a"] == b"1" and not {b"tenant:standard:b", b"tenant:batch:b"} & set(
        places
    )
    assert float(places[b"interval_ms"]) >= 0 and await redis.xlen(KEYS.requests) == 1


async def test_one_tenant_alone_has_every_place_and_leaves_them_to_those_who_come(redis: Redis) -> None:
    assert await fill(redis, "a", 100, tenant="a") == LIMIT
    assert await ask(redis, "b0", tenant="b") == "requests"
    for i in range(LIMIT):
        await end(redis, f"a{i}")
        assert await ask(redis, f"again{i}", tenant="a") == ("tenant" if i < LIMIT // 2 else "admitted")
        if i < LIMIT // 2:
            assert await ask(redis, f"b{i}", tenant="b") == "admitted"
        else:
            break
    assert await fill(redis, "more", 3, tenant="b") == 0


async def test_shares_have_the_weights_of_tenants(redis: Redis) -> None:
    for tenant, weight in (("a", 4.0), ("b", 1.0)):
        await ask(redis, f"first-{tenant}", tenant=tenant, weight=weight)
    assert await fill(redis, "b", 10, tenant="b", weight=1.0) == 1
    assert await fill(redis, "a", 10, tenant="a", weight=4.0) == 7


async def test_a_share_grows_when_other_tenants_ask_no_more(redis: Redis) -> None:
    """The sum of weights is kept beside the places: tenants that have left must leave it."""
    tenants = KEYS.tenants("standard")
    for tenant in "abcde":
        await ask(redis, f"first-{tenant}", tenant=tenant)
    assert await fill(redis, "a", 10, tenant="a") == 1, "two of ten places"
    for tenant in "cde":
        await redis.zadd(tenants, {f"1.0 {tenant}": 1})
        await end(redis, f"first-{tenant}")
    assert await fill(redis, "more", 10, tenant="a") == 3, "five of ten"
    for name in ("first-a", "first-b", "a0", "more0", "more1", "more2"):
        await end(redis, name)
    assert not await redis.exists(KEYS.places)
    assert await fill(redis, "again", 10, tenant="a") == 5, "the sum is made anew"
    assert await ask(redis, "new", tenant="f", weight=3.0) == "admitted"
    assert await fill(redis, "f", 10, tenant="f", weight=3.0) == 4, "up to the limit"
    await end(redis, "again0")
    assert await ask(redis, "last", tenant="a") == "tenant", "two of ten"


async def test_tenants_of_which_none_has_asked_for_long_are_counted_once_when_they_are_back(
    redis: Redis,
) -> None:
    """Their key has expired, the places of what they run are taken still."""
    for tenant in "ab":
        await ask(redis, f"first-{tenant}", tenant=tenant)
    for i in range(3):
        assert await ask(redis, f"a{i}", tenant="a") == "admitted"
        await redis.delete(KEYS.tenants("standard"))
        assert await ask(redis, f"b{i}", tenant="b") == "admitted"
    assert await fill(redis, "more", 10, tenant="a") == 1, "five of ten"


async def test_entries_of_an_older_version_are_counted(redis: Redis) -> None:
    """They do not say what they take, and older versions delete entries without giving the places back."""
    for _ in range(3):
        old = await redis.xadd(KEYS.requests, {"generate": b"x" * 7})
    assert await fill(redis, "r", 20) == LIMIT - 3
    await redis.xdel(KEYS.requests, old, await redis.hget(KEYS.request("r0"), "entry"))  # type: ignore[misc]
    assert await fill(redis, "s", 20) == 2


async def test_what_is_refused_says_when_to_ask_again(redis: Redis) -> None:
    await fill(redis, "r", LIMIT)
    await redis.hset(KEYS.places, "interval_ms", "250.0")  # type: ignore[misc]
    reply = await admit(redis, replace(REQUEST, request_id="late"), limit=4)
    wanted = AdmitReply("requests", num_counted=LIMIT, wait_ms=7 * 250)
    assert reply == wanted, "seven must end before one of four places is free"
    for i in range(3):
        await end(redis, f"r{i}")
    assert 0 <= float(await redis.hget(KEYS.places, "interval_ms")) < 250  # type: ignore[misc]
    for i in range(3, LIMIT):
        await end(redis, f"r{i}")
    assert not await redis.exists(KEYS.places)


async def test_an_entry_that_is_no_request_gives_its_place_back(redis: Redis) -> None:
    """Somebody else wrote it: it weighs nothing."""
    foreign = await redis.xadd(KEYS.requests, {"hello": "world"})
    await fill(redis, "r", 1)
    assert await dequeue(redis, "foreign", foreign)
    places = await redis.hgetall(KEYS.places)  # type: ignore[misc]
    assert (places[b"all"], places[b"bytes:standard"], places[b"tenant:standard:"]) == (b"1", b"10", b"1")
