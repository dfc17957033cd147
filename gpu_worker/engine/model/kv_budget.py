"""How many KV blocks a rank has room for; and KV scales, which a checkpoint has for a cache of 8-bit
floats.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common.process import machine
from common.settings.settings import Settings
from gpu_worker.engine.attention.kv_cache import Geometry, LayerSpec
from gpu_worker.engine.model.weights import TEXT_KEY_MAPPING
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.quantization.checkpoint import file_slices
from gpu_worker.protocol import UnservableModel

KEY_SCALES = (
    "k_scale",
    "k_proj.k_scale",
    "qkv_proj.k_scale",
    "attn.k_scale",
    "k_proj.output_scale",
    "kv_scale",
)
VALUE_SCALES = tuple(name.replace("k_", "v_") for name in KEY_SCALES)
"""Names after that of an attention module: of compressed-tensors, ModelOpt, vLLM, and of older versions."""
FREE_SHARE = 0.02
"""Share of a GPU that stays free for allocations of libraries, and for holes between allocations."""


def scale_layers(model: Any, path: Path, layers: Mapping[Any, LayerSpec]) -> dict[Any, LayerSpec]:
    """`layers` with the checkpoint's scales, 1 where it has none. A latent and its rotary part have one
    scale. Raises UnservableModel.
    """
    names = {module: name for name, module in model.named_modules()}
    scales = {text_name(name): tensor for name, tensor in file_slices(path) if name.endswith("_scale")}
    scaled = {
        module: replace(
            layer,
            key_scale=find_scale(scales, names[module], KEY_SCALES),
            value_scale=find_scale(scales, names[module], KEY_SCALES if layer.spec.latent else VALUE_SCALES),
        )
        for module, layer in layers.items()
    }
    for module, layer in layers.items():
        if hasattr(module, "kv_lora_rank") and not layer.spec.latent and scaled[module] != layer:
            raise UnservableModel("its KV scales are those of latents, and its cache keeps K and V")
    return scaled


def text_name(name: str) -> str:
    """The name in the model for text of a tensor of the checkpoint."""
    for pattern, replacement in TEXT_KEY_MAPPING.items():
        name = re.sub(pattern, replacement, name)
    return name


def find_scale(scales: Mapping[str, Any], module: str, names: tuple[str, ...]) -> float:
    """The scale of an attention module, under one of `names`. Raises UnservableModel unless it is one
    positive number.
    """
    name = next((name for last in names if (name := f"{module}.{last}") in scales), None)
    if name is None:
        return 1.0
    scale = scales[name][...].float().flatten()
    if len(scale) != 1:
        raise UnservableModel(f"{name} has {len(scale)} numbers; a cache of 8-bit floats has one for a layer")
    if not (0 < scale.item() < math.inf):
        raise UnservableModel(f"{name} is {scale.item()}, and must be more than 0")
    return float(scale.item())


def count_blocks(
    settings: Settings,
    geometry: Geometry,
    device: torch.device,
    communicator: Communicator,
    peak_bytes: Callable[[], int],
) -> int:
    """How many blocks the cache has without the scratch block, the same on all ranks. Raises SettingError.

    KV_CACHE_BYTES is for all ranks together. Without it, on CUDA, the cache gets CUDA_MEMORY_FRACTION of the
    GPU without the weights and `peak_bytes()`, which the largest step allocates.
    """
    if device.type == "cuda":
        left_bytes = cuda_bytes(device, settings.cuda_memory_fraction)
        available_bytes = max(
            0, left_bytes - peak_bytes() - int(FREE_SHARE * torch.cuda.mem_get_info(device)[1])
        )
    else:
        available_bytes = machine.available_bytes()
    if device.type == "cuda" and settings.kv_cache_bytes is None:
        return communicator.all_reduce_min(geometry.num_blocks(available_bytes, available_bytes))
    share_bytes = (
        settings.cpu_cache_bytes * geometry.block_bytes // communicator.all_reduce_sum(geometry.block_bytes)
    )
    return communicator.all_reduce_min(geometry.num_blocks(share_bytes, available_bytes))


def cuda_bytes(device: torch.device, fraction: float) -> int:
    """What this process may still allocate on a GPU: at most its fraction of the whole, which torch enforces
    from now on.
    """
    torch.cuda.set_per_process_memory_fraction(fraction)
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return min(free_bytes, int(fraction * total_bytes) - torch.cuda.memory_reserved(device))


def measure_peak(device: torch.device, run: Callable[[], object]) -> int:
    """The most bytes that `run` allocates at a time."""
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before_bytes
