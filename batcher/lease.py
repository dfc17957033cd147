"""The right to be the active batcher of a pool: one holder at a time, and an epoch that fences the plans of
earlier ones.
"""

import asyncio
import logging

from redis.asyncio import Redis

from common.broker.client import ERRORS, describe_error, script
from common.broker.keys import Keys

log = logging.getLogger(__name__)
GIVE_BACK_S = 1.0


class LeaseLost(Exception):
    """Another batcher is active."""


class Lease:
    """Raises LeaseLost once another batcher took over; a broker that was away and came back is no reason."""

    def __init__(self, redis: Redis, keys: Keys, who: str, ttl_s: float) -> None:
        self.keys, self.who, self.ttl_s = keys, who, ttl_s
        self.script = script(redis, "lease")
        self.epoch = ""

    async def ask(self, ttl_s: float) -> str:
        answer: bytes = await self.script(
            keys=[self.keys.batcher, self.keys.epoch], args=[self.who, int(ttl_s * 1000), self.epoch]
        )
        return answer.decode()

    async def take(self) -> int:
        """Waits until the lease is ours. Returns the new epoch."""
        standing_by = False
        while True:
            try:
                if epoch := await self.ask(self.ttl_s):
                    self.epoch = epoch
                    return int(epoch)
                if not standing_by:
                    log.info("another batcher is active: standing by")
                standing_by = True
            except ERRORS as error:
                log.warning("waiting for the broker: %s", describe_error(error))
            await asyncio.sleep(min(0.5, self.ttl_s / 4))

    async def renew(self) -> None:
        if await self.ask(self.ttl_s) != self.epoch:
            raise LeaseLost(f"epoch {self.epoch} is over")

    async def give_back(self) -> None:
        """A successor need not wait."""
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await self.ask(0)
        except ERRORS as error:
            log.warning("the lease stays until it expires: %s", describe_error(error))
