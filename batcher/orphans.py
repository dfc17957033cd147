"""Requests whose gateway died: they live on for their grace, then are cancelled."""

import time
from collections.abc import Collection

from redis.asyncio import Redis

from batcher.sequence import Sequence
from common.broker.keys import Keys


class Gateways:
    """Since when which gateway has shown no sign of life."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis, self.keys = redis, keys
        self.absent_since: dict[str, float] = {}

    async def orphans(self, sequences: Collection[Sequence]) -> list[str]:
        """Ids of requests whose gateway has been gone for longer than their grace."""
        names = sorted({sequence.request.gateway for sequence in sequences if sequence.request.gateway})
        async with self.redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.exists(self.keys.gateway(name))
            alive = await pipe.execute()
        now = time.monotonic()
        absent = {name for name, there in zip(names, alive, strict=True) if not there}
        self.absent_since = {name: self.absent_since.get(name, now) for name in absent}
        return [
            one.request_id
            for one in sequences
            if (since := self.absent_since.get(one.request.gateway))
            and (now - since) * 1000 >= one.request.grace_ms
        ]
