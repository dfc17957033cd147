"""Many streams at once through several gateways and workers; lost messages; and what is left afterwards: nothing."""

import asyncio

import psutil
import pytest

from api.submit import MAX_COMMANDS
from benchmarks.client import events, stream
from common.broker import connect
from common.codec import decode
from common.keys import Keys
from common.messages import Events, unpack_floats, unpack_ids
from tests.fleet import Fleet
from tests.loads import Load, body
from tests.waiting import wait_until

KEYS = Keys("default")
SETTINGS = {"num_workers": 2, "num_gateways": 2, "dtype": "float32", "debug_kv": True, "kv_cache_bytes": "256MiB"}
NUM_KINDS = 10
STANDING = {"workers", "processes", "batcher", "epoch", "control", "state", "requests", "worker", "gateway", "plans", "reports", "log"} | {
    "metrics",
    "life",
    "submit",
    "jobs",
}
"""Keys of a fleet that does nothing: all but those of requests."""


async def handles(fleet: Fleet) -> dict[str, int]:
    return {name: psutil.Process(pid).num_fds() for name, pid in fleet.pids().items() if name != "broker"}


async def idle(redis) -> bool:
    """Whether no request, row, block, stream or task of one is left anywhere, by everybody's own word."""
    state = await redis.hgetall(KEYS.key("state"))
    gateways = [await redis.hgetall(key) async for key in redis.scan_iter(KEYS.gateway("*"))]
    kinds = {key.decode().split(":")[2] async for key in redis.scan_iter(KEYS.key("*"))}
    busy = [int(state.get(name, b"1")) for name in (b"requests", b"rows", b"blocks")]
    return (
        not any(busy)
        and all(gateway[b"streams"] == b"0" for gateway in gateways)
        and kinds <= STANDING
        and not await redis.xlen(KEYS.requests)
    )


async def tasks(redis) -> dict[bytes, int]:
    return {key: int(await redis.hget(key, "tasks")) async for key in redis.scan_iter(KEYS.gateway("*"))}


async def many(fleet: Fleet, count: int) -> None:
    """Streams and answers in one piece, some given up half-way: each complete, none mixed up."""
    url = f"{fleet.base_url}/generate_stream"
    alone = [(await stream(url, body(kind, 12))).frames for kind in range(NUM_KINDS)]

    async def one(i: int) -> None:
        if i % 5 == 4:
            await give_up(i)
        else:
            assert (await stream(url, body(i % NUM_KINDS, 12))).ids == [frame["token"]["id"] for frame in alone[i % NUM_KINDS]]

    async def give_up(i: int) -> None:
        async for frame in events(url, body(i % NUM_KINDS, 200)):
            if frame["index"] == 3:
                return

    async with asyncio.timeout(240):
        await asyncio.gather(*(one(i) for i in range(count)))


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
async def test_many_streams_leave_nothing_behind(count):
    with Fleet(**SETTINGS) as fleet:
        redis = connect(fleet.redis_url)
        await many(fleet, NUM_KINDS)
        await wait_until(lambda: idle(redis), 20)
        tasks_before, handles_before = await tasks(redis), await handles(fleet)
        await many(fleet, count)
        await wait_until(lambda: idle(redis), 20)
        await wait_until(lambda: same(tasks(redis), tasks_before), 20)
        await wait_until(lambda: no_more(handles(fleet), handles_before), 20)
        await redis.aclose()


async def same(now, before) -> bool:
    return await now == before


async def no_more(now, before) -> bool:
    """Whether there are no more handles than before, but for connections to the broker, which a gateway keeps for the next commands."""
    counts = await now
    return all(counts[name] <= before[name] + MAX_COMMANDS for name in before)


async def test_lost_messages_cost_no_frame():
    """The gateways lose a tenth of all messages; we, who lose none, know what the frames must be."""
    with Fleet(**SETTINGS, tokenfleet_test_lose="0.1:7") as fleet:
        redis = connect(fleet.redis_url)
        async with redis.pubsub() as pubsub:
            await pubsub.psubscribe(KEYS.events("*"))
            load = Load(fleet, 60)
            await load.whole()
            published = await said(pubsub)
        await wait_until(lambda: idle(redis), 20)
        await redis.aclose()
    shown = [[list(frame["token"].values())[:3] for frame in one.frames] for one in load.streams]
    assert sorted(shown) == sorted(published.values())


async def said(pubsub) -> dict[str, list]:
    """[id, text, log-probability] of every token published, by request."""
    published: dict[str, list] = {}
    while (message := await pubsub.get_message(timeout=0.2)) is not None:
        for tokens in decode(Events, message["data"]).tokens if message["type"] == "pmessage" else ():
            triples = zip(unpack_ids(tokens.ids), tokens.texts, unpack_floats(tokens.logprobs), strict=True)
            published.setdefault(tokens.request_id, []).extend(map(list, triples))
    return published
