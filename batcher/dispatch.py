"""Dispatch: writes plans to the streams of workers, and records which worker holds the rows that start.

Publishing the same plan twice changes nothing: its stream id is its number.
"""

from batcher.scheduling.plans import PendingPlan
from batcher.scheduling.sequence import PlacedRow
from common.broker import batcher_scripts
from common.broker.batcher_scripts import PlanReply, StartedRow
from common.broker.keys import Keys
from common.broker.lua import ScriptCall
from common.broker.pool_client import PoolClient
from common.messages.plan import Plan


async def send_takeover(pool: PoolClient, incarnation: str, epoch: int) -> str:
    """Publish the first plan of an epoch: the worker reports what it holds."""
    plan = Plan(epoch, 1, 0, 0, takeover=True)
    call = batcher_scripts.publish_plan(pool.keys, incarnation, plan=plan, oldest=1, rows=[])
    return (await pool.run(call)).status


def publish(keys: Keys, pending: PendingPlan) -> ScriptCall[PlanReply]:
    """Return the call that publishes a plan."""
    replica = pending.replica
    oldest = min(replica.plan_seen, replica.plan_written)  # whether the next one is written is looked up
    rows = [started_row(row) for row in pending.rows]
    worker = replica.capacity.incarnation
    return batcher_scripts.publish_plan(keys, worker, plan=pending.plan, oldest=oldest, rows=rows)


def started_row(row: PlacedRow) -> StartedRow:
    sequence = row.sequence
    return StartedRow(
        sequence.request_id, attempt=sequence.attempt, base=sequence.base, num_cached=row.num_cached
    )
