"""A worker's heartbeat: that it is alive, what it can hold, and what it holds."""

from common.broker import worker_scripts
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.plan import WorkerCapacity
from common.process.heartbeat import HeartbeatFields, process_fields
from common.settings.settings import Settings
from gpu_worker.agent.publish import raise_refusal
from gpu_worker.agent.state import AgentState


async def write_heartbeat(
    pool: PoolClient, settings: Settings, worker: WorkerCapacity, state: AgentState
) -> bool:
    """Write the heartbeat of an incarnation to Redis → whether the worker was asked to drain. Raises Sealed
    or StreamsGone when the incarnation is over.
    """
    table = state.table
    load: HeartbeatFields = process_fields() | {
        "rows": len(table.live),
        "max_rows": settings.max_batch_size,
        "blocks": table.num_blocks(worker.block_size),
        "tokens": state.num_tokens,
        "known": table.num_known,
        "cached": table.num_cached,
    }
    call = worker_scripts.worker_heartbeat(
        pool.keys,
        worker.incarnation,
        capacity=encode(worker),
        ttl_ms=int(settings.worker_ttl_s * 1000),
        state="draining" if state.draining.is_set() else "ready",
        step=state.step,
        fields=load,
    )
    reply = await pool.run(call)
    if reply == "DRAIN":
        return True
    raise_refusal(reply)
    return False
