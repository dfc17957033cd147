"""Preload flags: how far a process is prepared before it has its place, by the memory that is left."""

from common.process import memory
from common.process.preload import FLAG, LOAD_FLAG
from common.settings.settings import Settings
from deploy.serve import checks

RANK_BYTES = 512 * 2**20
"""What an engine's process with torch and transformers takes, a little more than was measured."""
GATEWAY_BYTES = 128 * 2**20


def worker_flags(settings: Settings, worker_bytes: int) -> list[str]:
    """How a worker is preloaded: with its model, where that is on CPU and of one rank and leaves memory, or
    without; not at all where even that does not, unless PRELOAD_WORKER demands it. `worker_bytes`: what a
    worker takes that has loaded the model; 0 where nobody knows, as on macOS.
    """
    num_ranks = settings.num_shard or 1
    may_load = num_ranks == 1 and not checks.caches_on_gpu(settings) and worker_bytes > 0
    if may_load and fits_in_memory(settings, max(worker_bytes, RANK_BYTES)):
        return [FLAG, LOAD_FLAG]
    return [FLAG] if settings.preload_worker or fits_in_memory(settings, num_ranks * RANK_BYTES) else []


def gateway_flags(settings: Settings) -> list[str]:
    """How a gateway is preloaded, if it is to be."""
    return [FLAG] if settings.preload_gateway or fits_in_memory(settings, GATEWAY_BYTES) else []


def fits_in_memory(settings: Settings, taken_bytes: int) -> bool:
    """Whether so much leaves memory for all caches, and as much again. Caches on CPU take their pages as they
    are used.
    """
    caches_bytes = 0 if checks.caches_on_gpu(settings) else settings.num_workers * settings.cpu_cache_bytes
    return memory.available_bytes() - caches_bytes >= 2 * taken_bytes
