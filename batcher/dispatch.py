"""Dispatch: writes plans to the streams of workers, and records which worker holds the rows that start."""

from redis.asyncio import Redis

from batcher.scheduling.plans import PendingPlan
from batcher.scheduling.sequence import PlacedRow
from common.broker.client import script
from common.broker.fast_client import Argument, ScriptCall
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
        plan = Plan(epoch, 1, 0, 0, takeover=True)
        call = self.publish_plan(incarnation, plan, [], 1)
        return read_answer(await self.script(keys=call.keys, args=call.args))[0]

    def publish(self, pending: PendingPlan) -> ScriptCall:
        """The call that publishes a plan; `read_answer` reads its reply."""
        replica = pending.replica
        oldest = min(replica.plan_seen, replica.plan_written)  # whether the next one is written is looked up
        return self.publish_plan(replica.capacity.incarnation, pending.plan, pending.rows, oldest)

    def publish_plan(self, incarnation: str, plan: Plan, rows: list[PlacedRow], oldest: int) -> ScriptCall:
        row_args = [arg for row in rows for arg in (row.sequence.attempt, row.sequence.base, row.num_cached)]
        request_keys = [self.keys.request(row.sequence.request_id) for row in rows]
        own_keys = [self.keys.plans(incarnation), self.keys.log(incarnation), self.keys.epoch]
        plan_id, oldest_id = f"{plan.epoch}-{plan.number}", f"{plan.epoch}-{oldest}"
        args: list[Argument] = [plan_id, encode(plan), oldest_id, STREAMS_TTL_MS, incarnation, *row_args]
        return ScriptCall("publish_plan", [*own_keys, *request_keys], args)


def read_answer(reply: list[bytes]) -> tuple[str, list[int]]:
    """Return "OK", or why nothing was written.

    With "refused" come the positions, from 0, of the rows that are cancelled or have ended.
    """
    if reply[0] == b"refused":
        return "refused", [int(position) - 1 for position in reply[1:]]
    return reply[0].decode(), []
