"""Departure: when a batcher that was told to end may leave."""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

from redis.asyncio import Redis

from batcher.lease import Lease
from common.broker.client import ERRORS
from common.broker.keys import Keys
from common.settings.settings import Settings

LOOKS_BEFORE_GONE = 2
"""Heartbeats within which processes that were told to end at the same time show it."""

GatewayState = tuple[str, int]
"""State and number of streams of a gateway's heartbeat."""


class Departure:
    """A batcher leaves last: not before the gateways that end with it have finished their streams, unless
    another batcher stands by.

    Attributes:
        told: whether this batcher was told to end.
    """

    def __init__(self, redis: Redis, keys: Keys, settings: Settings, lease: Lease) -> None:
        self.redis = redis
        self.keys = keys
        self.settings = settings
        self.lease = lease
        self.told = asyncio.Event()

    async def wait(self) -> None:
        """Return when this batcher was told to end and may leave; GRACEFUL_TERMINATION_TIMEOUT bounds it."""
        await self.told.wait()
        looks = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.graceful_termination_timeout):
                while self.lease.epoch and await self.is_needed(looks):
                    looks += 1
                    await asyncio.sleep(self.settings.heartbeat_s)

    async def is_needed(self, looks: int) -> bool:
        try:
            members = split(await self.redis.zrange(self.keys.processes, 0, -1))
            batchers = [name for kind, name in members if kind == "batcher" and name != self.lease.holder]
            gateways = [name for kind, name in members if kind == "gateway"]
            async with self.redis.pipeline(transaction=False) as pipe:
                for name in batchers:
                    pipe.exists(self.keys.process("batcher", name))
                for name in gateways:
                    pipe.hmget(self.keys.gateway(name), ["state", "streams"])
                answers = await pipe.execute()
        except ERRORS:
            return True
        states = [(state.decode(), int(streams or 0)) for state, streams in answers[len(batchers) :] if state]
        return must_stay(any(answers[: len(batchers)]), states, looks)


def split(members: Iterable[bytes]) -> list[tuple[str, str]]:
    """Kind and name of each process."""
    return [(kind, name) for kind, _, name in (member.decode().partition(":") for member in members)]


def must_stay(has_standby: bool, gateways: Sequence[GatewayState], looks: int) -> bool:
    """Whether the active batcher must stay. At first every gateway is waited for: it may have been told to
    end as well, and not have shown it yet.
    """
    if looks < LOOKS_BEFORE_GONE:
        return bool(gateways)
    return not has_standby and any(state == "draining" and streams for state, streams in gateways)
