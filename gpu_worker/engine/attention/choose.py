"""The choice of the attention backend for a model and a device."""

import logging
from importlib.util import find_spec

import torch

from gpu_worker.engine.attention import cpu_paged
from gpu_worker.engine.attention.backend import AttentionBackend
from gpu_worker.engine.attention.cpu_paged import CpuPagedBackend
from gpu_worker.engine.attention.flashinfer_support import unsupported_because
from gpu_worker.engine.attention.kv_cache import Geometry
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.cpu import native

log = logging.getLogger(__name__)


def choose_backend(
    geometry: Geometry, device: torch.device, max_rows: int, max_blocks: int
) -> AttentionBackend:
    """The fastest backend that has kernels for the model, for steps of so many rows of so many blocks."""
    if device.type == "cuda":
        return choose_cuda_backend(geometry, device, max_rows, max_blocks)
    library = native.library() if cpu_paged.supports(geometry) else None
    return CpuPagedBackend(geometry, library) if library else SdpaBackend(geometry, device)


def choose_cuda_backend(
    geometry: Geometry, device: torch.device, max_rows: int, max_blocks: int
) -> AttentionBackend:
    """FlashInfer's attention where it is installed and has kernels for the model."""
    if find_spec("flashinfer") is None:
        log.warning("flashinfer-python is not installed: torch's attention is used and is slower")
        return SdpaBackend(geometry, device)
    from gpu_worker.engine.attention import flashinfer

    if reason := unsupported_because(geometry):
        log.warning("torch's attention is used instead of FlashInfer's, and is slower: %s", reason)
        return SdpaBackend(geometry, device)
    generation = torch.cuda.get_device_capability(device)[0]
    return flashinfer.FlashInferBackend(geometry, device, generation, max_rows, max_blocks)
