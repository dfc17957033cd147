"""How many KV blocks, and states of rows, a rank has room for; and KV scales, which a checkpoint has for a
cache of 8-bit floats.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.process import machine
from common.process.logs import plural
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.attention.backend import LayerSpec
from gpu_worker.engine.model.model import LoadedModel
from gpu_worker.engine.model.weights import TEXT_KEY_MAPPING
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.quantization.checkpoint import file_slices
from gpu_worker.protocol import UnservableModel

log = logging.getLogger(__name__)

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


SNAPSHOTS_PER_ROW = 2
"""One at the end of its prompt, and one at the end of its answer."""
SNAPSHOT_SHARE = 8
"""Snapshots take at most one part in this number of the cache's memory."""


class CacheRoom(NamedTuple):
    """What fits into memory beside the weights, the same on all ranks.

    Attributes:
        num_blocks: without the scratch block.
        num_slots: rows whose states fit, without the scratch slot; 0 in a model without states.
        num_snapshots: states at the ends of blocks that fit beside these.
    """

    num_blocks: int
    num_slots: int
    num_snapshots: int


def count_room(
    settings: Settings,
    loaded: LoadedModel,
    communicator: Communicator,
    peak_bytes: Callable[[], int],
    kept_bytes: int = 0,
) -> CacheRoom:
    """Count blocks, and slots of states. Raises SettingError.

    KV_CACHE_BYTES is for all ranks together. Without it, on CUDA, the cache gets CUDA_MEMORY_FRACTION of the
    GPU without the weights and `peak_bytes()`, which the largest step allocates. States come first: they are
    a fixed size for each row. `kept_bytes` are left for what is kept beside the cache: encoded pictures.
    Blocks that hold nothing, as an encoder's, only bound the tokens of rows.
    """
    geometry, device = loaded.geometry, loaded.device
    is_whole = device.type == "cuda" and settings.kv_cache_bytes is None
    own_bytes = geometry.block_bytes + loaded.states.slot_bytes
    if loaded.computes_whole:
        return CacheRoom(settings.max_batch_size * loaded.max_row_blocks, 0, 0)
    if device.type == "cuda":
        left_bytes = cuda_bytes(device, settings.cuda_memory_fraction)
        available_bytes = max(
            0, left_bytes - peak_bytes() - int(FREE_SHARE * torch.cuda.mem_get_info(device)[1])
        )
    else:
        available_bytes = machine.available_bytes()
    available_bytes = max(0, available_bytes - kept_bytes)
    share_bytes = (
        available_bytes
        if is_whole
        else settings.cpu_cache_bytes * own_bytes // max(1, communicator.all_reduce_sum(own_bytes))
    )
    num_slots = num_snapshots = 0
    if communicator.all_reduce_sum(loaded.states.slot_bytes):
        slots = count_slots(loaded, share_bytes, settings.max_batch_size)
        num_slots = communicator.all_reduce_min(slots)
        left_bytes = share_bytes - slots_bytes(loaded, num_slots)
        if settings.prefix_caching and loaded.names_blocks:
            most = SNAPSHOTS_PER_ROW * num_slots
            if slot_bytes := loaded.states.slot_bytes:  # a stage without states has room for any number
                most = min(most, min(left_bytes, share_bytes // SNAPSHOT_SHARE) // slot_bytes)
            num_snapshots = communicator.all_reduce_min(most)
        share_bytes = left_bytes - loaded.states.slot_bytes * num_snapshots
    num_blocks = communicator.all_reduce_min(geometry.num_blocks(share_bytes, available_bytes))
    if num_slots:
        num_blocks = min(num_blocks, (num_slots + num_snapshots) * loaded.max_row_blocks)
    return CacheRoom(num_blocks, num_slots, num_snapshots)


def count_slots(loaded: LoadedModel, share_bytes: int, max_rows: int) -> int:
    """How many rows' states fit into `share_bytes`, and half of it if there is a KV cache, too. Raises
    SettingError.
    """
    most_bytes = share_bytes // 2 if loaded.attentions else share_bytes
    slots = next((slots for slots in range(max_rows, 0, -1) if slots_bytes(loaded, slots) <= most_bytes), 0)
    if not slots:
        half = "half of " if loaded.attentions else ""
        cause = f"the states of one row take {slots_bytes(loaded, 1)} bytes"
        raise SettingError("kv_cache_bytes", f"{half}{share_bytes} bytes are too few: {cause}")
    if slots < max_rows:
        log.info(
            "memory has room for the states of %s (MAX_BATCH_SIZE is %d)", plural(slots, "row"), max_rows
        )
    return slots


def slots_bytes(loaded: LoadedModel, num_slots: int) -> int:
    """What the states of rows take, the scratch slot included; on CUDA twice, since a step has new ones
    beside the old until it is computed.
    """
    return loaded.states.slot_bytes * (num_slots + 1) * (2 if loaded.device.type == "cuda" else 1)


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
