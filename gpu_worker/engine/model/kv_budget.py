"""How many KV blocks a rank has room for."""

from collections.abc import Callable

import torch

from common.process import memory
from common.settings.settings import Settings
from gpu_worker.engine.attention.kv_cache import Geometry
from gpu_worker.engine.parallel.communicator import Communicator

MARGIN = 0.02
"""Share of a GPU that is left alone: what libraries allocate by themselves, and holes between allocations."""


def count_blocks(
    settings: Settings,
    geometry: Geometry,
    device: torch.device,
    communicator: Communicator,
    peak_bytes: Callable[[], int],
) -> int:
    """How many blocks the cache has, the same on all ranks; the scratch block comes on top. Raises
    SettingError.

    KV_CACHE_BYTES are for all ranks together. Without it, on CUDA, the cache gets what CUDA_MEMORY_FRACTION
    leaves of the GPU beside the weights and `peak_bytes()`: what the largest step allocates.
    """
    if device.type == "cuda":
        left_bytes = cuda_bytes(device, settings.cuda_memory_fraction)
        available_bytes = max(0, left_bytes - peak_bytes() - int(MARGIN * torch.cuda.mem_get_info(device)[1]))
    else:
        available_bytes = memory.available_bytes()
    if device.type == "cuda" and settings.kv_cache_bytes is None:
        return communicator.all_reduce_min(geometry.num_blocks(available_bytes, available_bytes))
    share_bytes = (
        settings.cpu_cache_bytes * geometry.block_bytes // communicator.all_reduce_sum(geometry.block_bytes)
    )
    return communicator.all_reduce_min(geometry.num_blocks(share_bytes, available_bytes))


def cuda_bytes(device: torch.device, fraction: float) -> int:
    """What this process may still take of a GPU: no more than its fraction of the whole, which torch enforces
    from now on.
    """
    torch.cuda.set_per_process_memory_fraction(fraction)
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return min(free_bytes, int(fraction * total_bytes) - torch.cuda.memory_reserved(device))


def measure_peak(device: torch.device, run: Callable[[], object]) -> int:
    """Bytes that `run` takes at most, beyond what is allocated before."""
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before_bytes
