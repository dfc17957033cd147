"""A worker's heartbeat: that it is alive, what it can hold, and what it holds."""

from redis.asyncio import Redis

from common.broker.client import script
from common.broker.keys import STREAMS_TTL_MS, Keys
from common.messages.codec import encode
from common.messages.plan import WorkerCapacity
from common.process.heartbeat import HeartbeatFields, process_fields
from common.settings.settings import Settings
from gpu_worker.agent.publish import raise_refusal
from gpu_worker.agent.row_text import RowTable


class WorkerHeartbeat:
    """Writes the heartbeat of one incarnation to Redis."""

    def __init__(self, redis: Redis, keys: Keys, settings: Settings, worker: WorkerCapacity) -> None:
        self.settings = settings
        self.worker = worker
        self.script = script(redis, "worker_heartbeat")
        name = worker.incarnation
        self.keys = [
            keys.worker(name),
            keys.workers,
            keys.log(name),
            keys.reports(name),
            keys.plans(name),
            keys.control,
        ]

    async def send(self, status: str, step: int, table: RowTable, num_tokens: int) -> bool:
        """`num_tokens`: sampled in this incarnation's life → whether the worker was asked to drain. Raises
        Sealed or StreamsGone when the incarnation is over.
        """
        load: HeartbeatFields = process_fields() | {
            "rows": len(table.live),
            "max_rows": self.settings.max_batch_size,
            "blocks": table.num_blocks(self.worker.block_size),
            "tokens": num_tokens,
            "known": table.num_known,
            "cached": table.num_cached,
        }
        ttl_ms = int(self.settings.worker_ttl_s * 1000)
        fields = [word for pair in load.items() for word in pair]
        reply: bytes = await self.script(
            keys=self.keys,
            args=[
                self.worker.incarnation,
                ttl_ms,
                STREAMS_TTL_MS,
                status,
                step,
                encode(self.worker),
                *fields,
            ],
        )
        if reply == b"DRAIN":
            return True
        raise_refusal(reply)
        return False
