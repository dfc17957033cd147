"""Orphans: requests whose gateway died. They go on for their grace period, then they are cancelled."""

import time
from collections.abc import Collection

from redis.asyncio import Redis

from batcher.scheduling.sequence import Sequence
from common.broker.keys import Keys


class OrphanTracker:
    """Tracks since when each gateway has sent no heartbeat."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis = redis
        self.keys = keys
        self.absent_since_s: dict[str, float] = {}

    async def orphans(self, sequences: Collection[Sequence]) -> list[str]:
        """Return the ids of requests whose gateway has been absent for longer than their grace."""
        gateways = sorted({sequence.request.gateway for sequence in sequences if sequence.request.gateway})
        async with self.redis.pipeline(transaction=False) as pipe:
            for gateway in gateways:
                pipe.exists(self.keys.gateway(gateway))
            present = await pipe.execute()
        now_s = time.monotonic()
        absent = {gateway for gateway, exists in zip(gateways, present, strict=True) if not exists}
        self.absent_since_s = {gateway: self.absent_since_s.get(gateway, now_s) for gateway in absent}
        return [
            sequence.request_id
            for sequence in sequences
            if (since_s := self.absent_since_s.get(sequence.request.gateway)) is not None
            and (now_s - since_s) * 1000 >= sequence.request.grace_ms
        ]
