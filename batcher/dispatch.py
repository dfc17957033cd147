"""Hands plans to workers, and with them the rows that start."""

from redis.asyncio import Redis

from batcher.pending_plan import Order
from batcher.sequence import Row
from common.broker.client import script
from common.broker.keys import STREAMS_TTL_MS, Keys
from common.messages.codec import encode
from common.messages.plan import Plan


class Dispatch:
    """Writes plans. A plan that is written twice is one plan: its id is its own."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.keys = keys
        self.script = script(redis, "publish_plan")

    async def takeover(self, incarnation: str, epoch: int) -> str:
        """The first plan of an epoch: the worker drops what it holds and says so."""
        return (await self.hand_over(incarnation, Plan(epoch, 1, 0, 0, takeover=True), [], 1))[0]

    async def write(self, order: Order) -> tuple[str, list[int]]:
        """Returns "OK", or why nothing was written; with "refused" the places, from 0, of rows that are
        cancelled or have ended.
        """
        return await self.hand_over(
            order.replica.capacity.incarnation, order.plan, order.started, order.replica.plan_seen
        )

    async def hand_over(
        self, incarnation: str, plan: Plan, started: list[Row], oldest: int
    ) -> tuple[str, list[int]]:
        rows = [part for row in started for part in (row.sequence.attempt, row.sequence.base)]
        homes = [self.keys.request(row.sequence.request_id) for row in started]
        answer = await self.script(
            keys=[self.keys.plans(incarnation), self.keys.log(incarnation), *homes],
            args=[
                f"{plan.epoch}-{plan.number}",
                encode(plan),
                f"{plan.epoch}-{oldest}",
                STREAMS_TTL_MS,
                incarnation,
                *rows,
            ],
        )
        return answer[0].decode(), [int(place) - 1 for place in answer[1:]] if answer[0] == b"refused" else []
