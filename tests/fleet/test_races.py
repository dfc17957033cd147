"""Cancel, finish and worker death at the same time: each request gets one terminal, and no key is left."""

import asyncio
import os
import random
import signal
from collections import Counter
from functools import partial

import pytest
from redis.asyncio.client import PubSub

from api.requests.request_scripts import cancel_request
from common.broker.client import connect
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.messages.codec import decode
from common.messages.events import Events
from common.messages.records import pack_ids
from common.messages.request import Generate, StoppingParams
from tests.support.broker_state import admit
from tests.support.chaos.launcher import ChaosFleet
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until

KEYS = Keys("default")
CHANNEL = KEYS.events("test")
SETTINGS = {
    "num_workers": 2,
    "dtype": "float32",
    "debug_kv": True,
    "kv_cache_bytes": "16MiB",
    "worker_ttl_s": 3,
}
NUM_BLOCKS = 22
"""Number of KV blocks that these bytes hold for the real model."""
AT_ONCE = 32
LONG = 200
"""Tokens of the request that is cancelled before its end."""


class Races:
    """Submits through Redis itself, as a gateway does, and counts terminals."""

    def __init__(self, fleet: Fleet, count: int, kill_every: int) -> None:
        self.fleet, self.count, self.kill_every = fleet, count, kill_every
        self.redis = connect(fleet.redis_url)
        self.draw = random.Random(count)
        self.terminals: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    async def run(self) -> None:
        await self.redis.set(KEYS.gateway("test"), 1)
        async with self.redis.pubsub() as pubsub:
            await pubsub.subscribe(CHANNEL)
            listening = asyncio.create_task(self.listen(pubsub))
            turns = asyncio.Semaphore(AT_ONCE)
            await self.cancel_before_its_end("r0")
            races = (self.race(f"r{i}", turns) for i in range(1, self.count))
            await asyncio.gather(*races, self.kill_workers())
            await wait_until(self.settled)
            listening.cancel()

    async def listen(self, pubsub: PubSub) -> None:
        async for message in pubsub.listen():
            if message["type"] == "message":
                for terminal in decode(Events, message["data"]).terminals:
                    self.terminals[terminal.request_id] += 1
                    self.reasons[terminal.reason] += 1

    async def cancel_before_its_end(self, name: str) -> None:
        """Cancel one early: if this process is slow, all other cancels may come too late."""
        await self.submit(name, LONG)
        await cancel_request(PoolClient(self.redis, KEYS), name)
        await wait_until(lambda: self.terminals[name])

    async def race(self, name: str, turns: asyncio.Semaphore) -> None:
        async with turns:
            await self.submit(name, self.draw.randint(1, 16))
            if self.draw.random() < 0.6:
                await wait_until(lambda: True if self.draw.random() < 0.02 else self.terminals[name])
                await cancel_request(PoolClient(self.redis, KEYS), name)
            await wait_until(lambda: self.terminals[name])

    async def submit(self, name: str, num_tokens: int) -> None:
        ids = [self.draw.randrange(1000, 40_000) for _ in range(self.draw.randint(1, 40))]
        request = Generate(
            name,
            "d",
            pack_ids(ids),
            StoppingParams(num_tokens, ignore_eos=True),
            channel=CHANNEL,
            gateway="test",
        )
        await admit(self.redis, request)

    async def kill_workers(self) -> None:
        for ended in range(self.kill_every, self.count, self.kill_every):
            await wait_until(partial(self.have_ended, ended), 120)
            name = self.draw.choice(["w0", "w1"])
            os.kill(await asyncio.to_thread(self.fleet.pid, name), signal.SIGKILL)

    def have_ended(self, count: int) -> bool:
        return len(self.terminals) >= count

    async def settled(self) -> bool:
        return not await self.redis.xlen(KEYS.requests)


async def race(new_fleet: Fleet, count: int, kill_every: int) -> None:
    with new_fleet as fleet:
        races = Races(fleet, count, kill_every)
        await races.run()
        assert len(races.terminals) == count
        assert set(races.terminals.values()) == {1}
        assert races.reasons["length"] > 0 and races.reasons["cancelled"] > 0, races.reasons
        assert races.reasons["error"] == 0, races.reasons
        async for key in races.redis.scan_iter(KEYS.tokens("*")):
            request = key.replace(b":tokens:", b":request:")
            assert await races.redis.hget(request, "terminal") == b"length", "no answer, no tokens"  # type: ignore[misc]
        assert await races.redis.exists(KEYS.places) == 0
        await races.redis.aclose()


@pytest.mark.slow
async def test_each_request_gets_one_terminal() -> None:
    """Engines have no model, but rows as in the real engine."""
    fleet = ChaosFleet(step_ms=10.0, num_blocks=NUM_BLOCKS, **SETTINGS)
    await race(fleet, 60, kill_every=25)
