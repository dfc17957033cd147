"""Dispatch: writes plans to the streams of workers, and records which worker holds the rows that start.

Publishing the same plan twice changes nothing: its stream id is its number.
"""

from batcher.scheduling.plans import PendingPlan
from batcher.scheduling.sequence import PlacedRow
from common.broker.fast_client import Argument, ScriptCall
from common.broker.keys import STREAMS_TTL_MS, Keys
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.plan import Plan


async def send_takeover(pool: PoolClient, incarnation: str, epoch: int) -> str:
    """Publish the first plan of an epoch: the worker reports what it holds."""
    plan = Plan(epoch, 1, 0, 0, takeover=True)
    return read_answer(await pool.run(*publish_plan(pool.keys, incarnation, plan, [], 1)))[0]


def publish(keys: Keys, pending: PendingPlan) -> ScriptCall:
    """The call that publishes a plan; `read_answer` reads its reply."""
    replica = pending.replica
    oldest = min(replica.plan_seen, replica.plan_written)  # whether the next one is written is looked up
    return publish_plan(keys, replica.capacity.incarnation, pending.plan, pending.rows, oldest)


def publish_plan(keys: Keys, incarnation: str, plan: Plan, rows: list[PlacedRow], oldest: int) -> ScriptCall:
    row_args = [arg for row in rows for arg in (row.sequence.attempt, row.sequence.base, row.num_cached)]
    request_keys = [keys.request(row.sequence.request_id) for row in rows]
    own_keys = [keys.plans(incarnation), keys.log(incarnation), keys.epoch]
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
