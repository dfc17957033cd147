"""Counts: how much a scheduler holds, for dashboards and people."""

from collections import Counter

from batcher.scheduling.scheduler import Scheduler
from common.messages.service_class import SERVICE_CLASSES


def count(scheduler: Scheduler) -> dict[str, int]:
    """Numbers of workers, live requests, waiting requests, and rows and KV blocks on workers."""
    replicas = scheduler.replicas.values()
    waiting = Counter(sequence.rank for sequence in scheduler.sequences.values() if sequence.waiting)
    return {
        "workers": len(replicas),
        "requests": len(scheduler.sequences),
        "waiting": waiting.total(),
        **{f"waiting_{name}": waiting[rank] for rank, name in enumerate(SERVICE_CLASSES)},
        "rows": sum(len(replica.rows) for replica in replicas),
        "blocks": sum(replica.pool.num_blocks - replica.pool.num_free for replica in replicas),
    }
