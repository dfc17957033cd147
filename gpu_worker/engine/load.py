"""From settings to a model on its device, with a cache on its attention modules."""

import importlib
import io
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from common import memory, model_files, processor
from common.settings import SettingError, Settings
from gpu_worker.engine import attention, native, paged, parallel, rope
from gpu_worker.engine.cache import Cache, Geometry
from gpu_worker.engine.config import read_config, unservable
from gpu_worker.engine.fuse import fuse
from gpu_worker.engine.inputs import Inputs
from gpu_worker.engine.pack import pack
from gpu_worker.engine.paged import Paged
from gpu_worker.engine.ranks import Ranks
from gpu_worker.engine.sdpa import Sdpa
from gpu_worker.engine.weights import read_weights
from gpu_worker.place import Place

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
WRITTEN_OUT = {"falcon": "gpu_worker.engine.falcon"}
"""Families whose model code attends by itself → what makes it go through the interface."""
BAR_S = 2.0


@dataclass(frozen=True, slots=True)
class Loaded:
    model: Any
    device: torch.device
    dtype: torch.dtype
    num_blocks: int
    cache: Cache
    backend: attention.Backend
    ropes: list[rope.Rope]
    context: int
    eos_ids: list[int]
    vocab_size: int

    def begin(self, line: Inputs) -> None:
        """Called before each forward."""
        self.backend.begin(line)
        for one in self.ropes:
            one.begin(line)


@torch.inference_mode()
def load(settings: Settings, progress: model_files.Progress, ranks: Ranks) -> Loaded:
    """Raises SettingError where these settings cannot be served; what can be known before weights are read is checked before."""
    path = model_files.resolve(settings.model_id, settings.revision, progress)
    device = choose_device(settings.device, ranks.place)
    dtype = choose_dtype(settings.dtype, device)
    torch.set_num_threads(settings.threads or max(1, processor.num_cores() // max(1, settings.num_workers * ranks.place.local_world_size)))
    config = read_config(path, settings)
    if config.model_type in WRITTEN_OUT:
        importlib.import_module(WRITTEN_OUT[config.model_type])
    show_bars(progress)
    progress(f"loading {settings.model_id} as {name_of(dtype)} on {device.type}")
    try:
        if ranks.world_size > 1:
            model, plan = parallel.read_part(path, config, dtype, device, settings, ranks)
        else:
            model, plan = read_weights(path, config, dtype, device, settings), parallel.NOT_SHARED
        if device.type == "cpu":
            pack(model)
        parallel.join(model, plan, ranks)
        layers = attention.watch(model, lambda: forward_one(model, device))
    except KeyError as error:  # model code that looks attention up in a table of its own
        raise unservable(settings.model_id, attention.Unservable(f"the attention of {config.model_type} cannot be replaced")) from error
    except (attention.Unservable, ValueError, OSError) as error:
        raise unservable(settings.model_id, error) from error
    geometry = Geometry(list(layers.values()), settings.block_size, dtype)
    available_bytes = cuda_bytes(device, settings.cuda_memory_fraction) if device.type == "cuda" else memory.available_bytes()
    share_bytes = settings.kv_cache_bytes * geometry.block_bytes // ranks.total(geometry.block_bytes)
    num_blocks = ranks.smallest(geometry.num_blocks(share_bytes, available_bytes))
    cache, backend = Cache(geometry, num_blocks, device), backend_of(geometry, device)
    attention.attach(layers, geometry, cache, backend)
    context, eos_ids = int(model_files.context(path) * (settings.rope_factor or 1)), model_files.eos_ids(path)
    loaded = Loaded(model, device, dtype, num_blocks, cache, backend, rope.by_length(model), context, eos_ids, config.vocab_size)
    fused = fuse(model, backend, loaded.begin) if isinstance(backend, Paged) else 0
    if settings.deterministic and fused < len(geometry.layers):
        known = f"{fused} of its {len(geometry.layers)} layers run in kernels that compute each token by itself"
        raise SettingError("deterministic", f"{settings.model_id} as {name_of(dtype)} on {device.type}: {known}")
    return loaded


def backend_of(geometry: Geometry, device: torch.device) -> attention.Backend:
    library = native.library() if device.type == "cpu" and paged.serves(geometry) else None
    return Paged(geometry, library) if library else Sdpa(geometry, device)


def show_bars(progress: model_files.Progress) -> None:
    """What transformers draws as progress bars is said now and then instead; what is over sooner is not."""

    def hook(bar_of: Any, args: Any, options: dict[str, Any]) -> Any:
        bar = bar_of(*args, **options, file=io.StringIO(), mininterval=BAR_S, delay=BAR_S)
        bar.display = lambda *_, **__: progress(f"{bar.desc}: {bar.n} of {bar.total}")
        return bar

    logging.set_tqdm_hook(hook)


def forward_one(model: Any, device: torch.device) -> None:
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    model(input_ids=zero, position_ids=zero, use_cache=False)


def cuda_bytes(device: torch.device, fraction: float) -> int:
    """What this process may still take of a GPU: no more than its fraction of the whole, which torch enforces from now on."""
    torch.cuda.set_per_process_memory_fraction(fraction)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return min(free_bytes, int(fraction * total_bytes) - torch.cuda.memory_reserved(device))


def choose_device(name: str, place: Place) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise SettingError("device", "cuda, but torch sees no CUDA device")
    if not available or name == "cpu":
        return torch.device("cpu")
    if place.local_rank >= torch.cuda.device_count():
        raise SettingError("num_shard", f"{place.local_world_size}, but torch sees {torch.cuda.device_count()} CUDA devices")
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else processor.has_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    return DTYPES[name]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
