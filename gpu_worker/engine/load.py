"""From settings to a model on its device, with a cache on its attention modules."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from common import memory, model_files
from common.settings import SettingError, Settings
from gpu_worker.engine import attention
from gpu_worker.engine.cache import Cache, Geometry
from gpu_worker.engine.pack import pack

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # Intel and AMD; Arm


@dataclass(frozen=True, slots=True)
class Loaded:
    model: Any
    device: torch.device
    dtype: torch.dtype
    num_blocks: int
    cache: Cache
    backend: attention.Backend
    context: int
    eos_ids: list[int]
    vocab_size: int


@torch.inference_mode()
def load(settings: Settings, progress: model_files.Progress) -> Loaded:
    """Raises SettingError where these settings cannot be served; what can be known before weights are read is checked before."""
    path = model_files.resolve(settings.model_id, settings.revision, progress)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    torch.set_num_threads(settings.threads or max(1, num_cores() // max(1, settings.num_workers)))
    config = read_config(path, settings.model_id)
    geometry = Geometry.of(config, settings.block_size, dtype)
    available_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory.available_bytes()
    num_blocks = geometry.num_blocks(settings.kv_cache_bytes, available_bytes)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    progress(f"loading {settings.model_id} as {name_of(dtype)} on {device.type}")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, attn_implementation=attention.NAME)
        model.to(device)
        if device.type == "cpu":
            pack(model)
        cache = Cache(geometry, num_blocks, device)
        backend = attention.Sdpa(geometry, config.num_attention_heads, device)
        attention.attach(model, lambda: forward_one(model, device), geometry, cache, backend)
    except (attention.Unservable, ValueError, OSError) as error:
        raise unservable(settings.model_id, error) from error
    context, eos_ids = model_files.context(path), model_files.eos_ids(path)
    return Loaded(model, device, dtype, num_blocks, cache, backend, context, eos_ids, config.vocab_size)


def forward_one(model: Any, device: torch.device) -> None:
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    model(input_ids=zero, position_ids=zero, use_cache=False)


def read_config(path: Path, model_id: str) -> Any:
    """The model's text config, refused where it says that its attention cannot be paged."""
    try:
        config = AutoConfig.from_pretrained(path)
    except (ValueError, OSError, KeyError) as error:
        raise unservable(model_id, error) from error
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise SettingError("model_id", f"{model_id} is an encoder-decoder model; only decoders are served")
    if not getattr(text, "num_attention_heads", None) or not getattr(text, "num_hidden_layers", None):
        raise SettingError("model_id", f"{model_id} ({config.model_type}) has no attention heads; only decoders with attention are served")
    if getattr(text, "alibi", False):
        raise SettingError("model_id", f"{model_id} ({config.model_type}) uses ALiBi position biases, which are not served")
    return text


def unservable(model_id: str, error: Exception) -> SettingError:
    cause = next(iter(str(error).splitlines()), "") or type(error).__name__
    return SettingError("model_id", f"{model_id} cannot be served: {cause}")


def choose_device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise SettingError("device", "cuda, but torch sees no CUDA device")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else bool(BFLOAT16_FLAGS & cpu_flags())
        return torch.bfloat16 if fast else torch.float32
    return DTYPES[name]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.partition(":")[2].split()}


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
