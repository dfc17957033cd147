"""Orphans: requests whose gateway died. They go on for their grace period, then they are cancelled."""

import time
from collections.abc import Collection, Mapping

from batcher.scheduling.sequence import Sequence
from common.broker.pool_client import PoolClient


class OrphanTracker:
    """Tracks since when each gateway has sent no heartbeat.

    Attributes:
        moved: request id → the gateway through which its client came back.
    """

    def __init__(self, pool: PoolClient) -> None:
        self.pool = pool
        self.absent_since_s: dict[str, float] = {}
        self.moved: dict[str, str] = {}

    async def orphans(self, live: Mapping[str, Sequence], gateways: Collection[str]) -> list[str]:
        """Return the ids of the live requests whose gateway has been absent for longer than their grace.
        `gateways` are those that sent them. While all are there, no request is looked at.
        """
        self.moved = {name: gateway for name, gateway in self.moved.items() if name in live}
        await self.look_for({*gateways, *self.moved.values()} - {""})
        sequences = live.values() if self.absent_since_s else ()
        now_s = time.monotonic()
        overdue = [
            sequence
            for sequence in sequences
            if (since_s := self.absent_since_s.get(self.gateway(sequence))) is not None
            and (now_s - since_s) * 1000 >= sequence.request.grace_ms
        ]
        moved = await self.find_moved(overdue)
        self.moved |= moved
        return [sequence.request_id for sequence in overdue if sequence.request_id not in moved]

    def gateway(self, sequence: Sequence) -> str:
        return self.moved.get(sequence.request_id, sequence.request.gateway)

    async def look_for(self, names: Collection[str]) -> None:
        """Note which of these gateways are absent."""
        gateways = sorted(names)
        async with self.pool.redis.pipeline(transaction=False) as pipe:
            for gateway in gateways:
                pipe.exists(self.pool.keys.gateway(gateway))
            present = await pipe.execute()
        now_s = time.monotonic()
        absent = {gateway for gateway, exists in zip(gateways, present, strict=True) if not exists}
        self.absent_since_s = {gateway: self.absent_since_s.get(gateway, now_s) for gateway in absent}

    async def find_moved(self, sequences: Collection[Sequence]) -> dict[str, str]:
        """The requests that Redis says are at another gateway than was known."""
        async with self.pool.redis.pipeline(transaction=False) as pipe:
            for sequence in sequences:
                pipe.hget(self.pool.keys.request(sequence.request_id), "gateway")
            found = await pipe.execute(raise_on_error=False)
        return {
            sequence.request_id: gateway.decode()
            for sequence, gateway in zip(sequences, found, strict=True)
            if isinstance(gateway, bytes) and gateway.decode() != self.gateway(sequence)
        }
