"""Hands plans to workers, and with them the rows that start."""

from dataclasses import replace

from redis.asyncio import Redis

from batcher.replica import Replica
from batcher.sequence import Row
from common.broker import script
from common.codec import encode
from common.keys import Keys
from common.messages import Plan

PLANS_TTL_MS = 3_600_000


class Dispatch:
    """Writes plans. A plan that is written twice is one plan: its id is its own."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.keys = keys
        self.script = script(redis, "hand_over")

    async def takeover(self, incarnation: str, epoch: int) -> str:
        """The first plan of an epoch: the worker drops what it holds and says so."""
        return (await self.write(incarnation, Plan(epoch, 1, 0, 0, takeover=True), [], 1))[0]

    async def send(self, replica: Replica, plan: Plan, started: list[Row]) -> tuple[str, list[Row]]:
        """Sends a plan without the rows that turn out cancelled or ended. Returns the answer ("OK", or why not) and those rows."""
        refused: list[Row] = []
        while True:
            answer, numbers = await self.write(replica.capacity.incarnation, plan, started, replica.plan_seen)
            if answer != "refused":
                return answer, refused
            out = {started[number - 1].number for number in numbers}
            refused += [row for row in started if row.number in out]
            started = [row for row in started if row.number not in out]
            plan = replace(plan, starts=[start for start in plan.starts if start.row not in out])

    async def write(self, incarnation: str, plan: Plan, started: list[Row], oldest: int) -> tuple[str, list[int]]:
        rows = [part for row in started for part in (row.sequence.attempt, row.sequence.base)]
        homes = [self.keys.home(row.sequence.request_id) for row in started]
        answer = await self.script(
            keys=[self.keys.plans(incarnation), self.keys.log(incarnation), *homes],
            args=[f"{plan.epoch}-{plan.number}", encode(plan), f"{plan.epoch}-{oldest}", PLANS_TTL_MS, incarnation, *rows],
        )
        return answer[0].decode(), [int(part) for part in answer[1:]] if answer[0] == b"refused" else []
