"""From settings to a model on its device, with a cache on its attention modules."""

import importlib
import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from common import model_files
from common.process import cpu
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.attention import backend as attention
from gpu_worker.engine.attention import cpu_paged
from gpu_worker.engine.attention.cpu_paged import CpuPagedBackend
from gpu_worker.engine.attention.kv_cache import Geometry, KVCache
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.batch.inputs import Inputs, build_inputs
from gpu_worker.engine.batch.rows import RowSlice
from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.fused_layer import fuse_layers
from gpu_worker.engine.cpu.packed_linear import pack_linears
from gpu_worker.engine.cuda.fused_linear import fuse_linears
from gpu_worker.engine.model import rope
from gpu_worker.engine.model.config import cannot_serve, read_config
from gpu_worker.engine.model.kv_budget import count_blocks, measure_peak
from gpu_worker.engine.model.warmup import max_prompt_tokens, run_largest_step
from gpu_worker.engine.model.weights import read_weights
from gpu_worker.engine.parallel import tp_model
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.rank import Place

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FAMILY_MODULES = {"falcon": "gpu_worker.engine.model.families.falcon"}
"""Families whose model code attends by itself → what makes it go through the interface."""
BLOCK_SIZES = {"cpu": 16, "cuda": 64}
PROGRESS_S = 2.0


@dataclass(slots=True)
class LoadedModel:
    """
    Attributes:
        attentions: the model's attention modules, in the order of layers.
        outgrown_at: of a sequence beyond this length every K is computed anew.
        cache: once one is attached.
    """

    model: Any
    attentions: list[Any]
    geometry: Geometry
    device: torch.device
    backend: attention.AttentionBackend
    ropes: list[rope.PerTokenRope]
    context: int
    eos_ids: list[int]
    vocab_size: int
    outgrown_at: int | None
    cache: KVCache = field(init=False)

    @property
    def plan_free(self) -> bool:
        """Whether steps in which all rows decode need nothing from the host but ids, positions and tables."""
        return self.backend.plan_free and not any(one.asks_device for one in self.ropes)

    def attach(self, num_blocks: int) -> None:
        """Gives it a cache of so many blocks, and of the scratch block."""
        self.cache = KVCache(self.geometry, num_blocks, self.device)
        attention.attach(self.attentions, self.geometry, self.cache, self.backend)

    @torch.inference_mode()
    def forward(self, line: Inputs) -> torch.Tensor:
        """→ logits [samples, vocabulary]"""
        self.backend.begin(line)
        for one in self.ropes:
            one.begin(line)
        return self.logits(line.ids, line.positions, line.sampled)

    @torch.inference_mode()
    def decode(self, ids: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """`forward` of rows that all decode, with nothing from the host: ids int64 [1, rows], positions int32
        [rows], table int32 [rows, blocks]. Only where `plan_free`.
        """
        self.backend.begin_decode(positions, table)  # type: ignore[attr-defined]
        for one in self.ropes:
            one.begin_decode(positions)
        return self.logits(ids, positions.long()[None], 0)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor | int) -> torch.Tensor:
        output = self.model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=kept, return_dict=True
        )
        logits: torch.Tensor = output.logits[0]
        return logits


@torch.inference_mode()
def load(settings: Settings, progress: model_files.Progress, communicator: Communicator) -> LoadedModel:
    """Raises SettingError where these settings cannot be served; what can be known before weights are read is
    checked before.
    """
    path = model_files.resolve(settings.model_id, settings.revision, progress)
    device = choose_device(settings.device, communicator.place)
    dtype = choose_dtype(settings.dtype, device)
    torch.set_num_threads(
        settings.threads
        or max(1, cpu.num_cores() // max(1, settings.num_workers * communicator.place.local_world_size))
    )
    config = read_config(path, settings)
    if config.model_type in FAMILY_MODULES:
        importlib.import_module(FAMILY_MODULES[config.model_type])
    report_progress(progress)
    progress(f"loading {settings.model_id} as {name_of(dtype)} on {device.type}")
    try:
        if communicator.world_size > 1:
            model, plan = tp_model.read_shard(path, config, dtype, device, settings, communicator)
        else:
            model, plan = read_weights(path, config, dtype, device, settings), tp_model.NO_TP_PLAN
        (pack_linears if device.type == "cpu" else fuse_linears)(model)
        tp_model.connect_shards(model, plan, communicator)
        layers = attention.watch(model, lambda: probe_forward(model, device))
    except KeyError as error:  # model code that looks attention up in a table of its own
        raise cannot_serve(
            settings.model_id,
            attention.UnservableModel(f"the attention of {config.model_type} cannot be replaced"),
        ) from error
    except (attention.UnservableModel, ValueError, OSError) as error:
        raise cannot_serve(settings.model_id, error) from error
    geometry = Geometry(list(layers.values()), settings.block_size or BLOCK_SIZES[device.type], dtype)
    context, eos_ids = (
        int(model_files.context_length(path) * (settings.rope_factor or 1)),
        model_files.eos_ids(path),
    )
    backend, ropes = choose_backend(geometry, device), rope.replace_ropes(model)
    loaded = LoadedModel(
        model,
        list(layers),
        geometry,
        device,
        backend,
        ropes,
        context,
        eos_ids,
        config.vocab_size,
        rope.recompute_length(model),
    )
    loaded.attach(0)
    loaded.attach(
        count_blocks(settings, geometry, device, communicator, lambda: peak_bytes(loaded, settings))
    )
    fused = (
        fuse_layers(model, backend, loaded.forward, context) if isinstance(backend, CpuPagedBackend) else 0
    )
    if settings.deterministic and (cause := nondeterministic_because(loaded, fused, communicator)):
        raise SettingError(
            "deterministic", f"{settings.model_id} as {name_of(dtype)} on {device.type}: {cause}"
        )
    return loaded


def nondeterministic_because(loaded: LoadedModel, fused: int, communicator: Communicator) -> str:
    """Why a token's bits may depend on what else runs; empty where they do not."""
    if loaded.device.type != "cuda":
        layers = len(loaded.geometry.layers)
        return (
            ""
            if fused == layers
            else f"{fused} of its {layers} layers run in kernels that compute each token by itself"
        )
    if communicator.world_size > 1:
        return "it runs on several ranks"
    if not loaded.plan_free:
        return "its steps cannot be captured"
    if loaded.ropes:  # tokens of prompts go through as rows that decode, and would take their frequencies
        return "its rotary frequencies depend on the length of the prompt"
    experts = any(weight.dim() == 3 for weight in loaded.model.parameters())
    return "its experts' products have shapes that depend on the batch" if experts else ""


def choose_backend(geometry: Geometry, device: torch.device) -> attention.AttentionBackend:
    if device.type == "cuda":
        return choose_cuda_backend(geometry, device)
    library = native.library() if cpu_paged.supports(geometry) else None
    return CpuPagedBackend(geometry, library) if library else SdpaBackend(geometry, device)


def choose_cuda_backend(geometry: Geometry, device: torch.device) -> attention.AttentionBackend:
    """FlashInfer's attention where it is installed and has kernels for the model."""
    if find_spec("flashinfer") is None:
        log.warning("flashinfer-python is not installed: torch's attention is used and is slower")
        return SdpaBackend(geometry, device)
    from gpu_worker.engine.attention import flashinfer

    if why := flashinfer.unsupported_because(geometry):
        log.warning("torch's attention is used instead of FlashInfer's, and is slower: %s", why)
        return SdpaBackend(geometry, device)
    return flashinfer.FlashInferBackend(geometry, device, torch.cuda.get_device_capability(device)[0])


def peak_bytes(loaded: LoadedModel, settings: Settings) -> int:
    """What the largest step allocates on CUDA, and what captured ones keep."""
    shape = (loaded.context, loaded.vocab_size, loaded.geometry.block_size)
    tokens, rows = (
        max_prompt_tokens(settings.max_batch_prefill_tokens, loaded.context, loaded.device),
        settings.max_batch_size,
    )

    def forward(parts: Sequence[RowSlice]) -> torch.Tensor:
        return loaded.forward(build_inputs(parts, loaded.geometry.block_size, loaded.device))

    kept_bytes = rows * loaded.vocab_size * loaded.geometry.dtype.itemsize
    return measure_peak(loaded.device, lambda: run_largest_step(forward, tokens, rows, *shape)) + kept_bytes


def report_progress(progress: model_files.Progress) -> None:
    """What transformers draws as progress bars is said now and then instead; what is over sooner is not."""

    def hook(bar_of: Any, args: Any, options: dict[str, Any]) -> Any:
        bar = bar_of(*args, **options, file=io.StringIO(), mininterval=PROGRESS_S, delay=PROGRESS_S)
        bar.display = lambda *_, **__: progress(f"{bar.desc}: {bar.n} of {bar.total}")
        return bar

    transformers_logging.set_tqdm_hook(hook)


def probe_forward(model: Any, device: torch.device) -> torch.Tensor:
    """→ logits [1, attention.WATCHED, vocabulary]"""
    positions = torch.arange(attention.WATCHED, device=device)[None]
    logits: torch.Tensor = model(
        input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False
    ).logits
    return logits


def choose_device(name: str, place: Place) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise SettingError("device", "cuda, but torch sees no CUDA device")
    if not available or name == "cpu":
        return torch.device("cpu")
    if place.local_rank >= torch.cuda.device_count():
        raise SettingError(
            "num_shard", f"{place.local_world_size}, but torch sees {torch.cuda.device_count()} CUDA devices"
        )
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu.has_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    return DTYPES[name]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
