"""Dispatch: writes plans to the streams of workers, and records which worker holds the rows that start."""

from redis.asyncio import Redis

from batcher.scheduling.pending_plan import PendingPlan
from batcher.scheduling.sequence import PlacedRow
from common.broker.client import script
from common.broker.keys import STREAMS_TTL_MS, Keys
from common.messages.codec import encode
from common.messages.plan import Plan


class Dispatch:
    """Publishes plans. Publishing the same plan twice changes nothing: its stream id is its number."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.keys = keys
        self.script = script(redis, "publish_plan")

    async def send_takeover(self, incarnation: str, epoch: int) -> str:
        """Publish the first plan of an epoch: the worker reports what it holds."""
        plan = Plan(epoch, 1, 0, 0, takeover=True, adopts=True)
        return (await self.publish_plan(incarnation, plan, [], 1))[0]

    async def publish(self, pending: PendingPlan) -> tuple[str, list[int]]:
        """Return "OK", or why nothing was written.

        With "refused" come the positions, from 0, of the rows that are cancelled or have ended.
        """
        replica = pending.replica
        return await self.publish_plan(
            replica.capacity.incarnation, pending.plan, pending.rows, replica.plan_seen
        )

    async def publish_plan(
        self, incarnation: str, plan: Plan, rows: list[PlacedRow], oldest: int
    ) -> tuple[str, list[int]]:
        row_args = [arg for row in rows for arg in (row.sequence.attempt, row.sequence.base, row.num_cached)]
        request_keys = [self.keys.request(row.sequence.request_id) for row in rows]
        answer = await self.script(
            keys=[self.keys.plans(incarnation), self.keys.log(incarnation), self.keys.epoch, *request_keys],
            args=[
                f"{plan.epoch}-{plan.number}",
                encode(plan),
                f"{plan.epoch}-{oldest}",
                STREAMS_TTL_MS,
                incarnation,
                *row_args,
            ],
        )
        if answer[0] == b"refused":
            return "refused", [int(position) - 1 for position in answer[1:]]
        return answer[0].decode(), []
