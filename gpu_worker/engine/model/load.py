"""Loading: from settings to a model on its device, with a KV cache on its attention modules. Ranks of several
machines, which find the model by themselves, first compare its files and their settings.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from common import model_files
from common.pooling import read_pooling
from common.process import machine
from common.process.logs import plural
from common.rank import RankInfo
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.attention.backend import FLOATS8, NAME, Geometry
from gpu_worker.engine.attention.choose import choose_backend
from gpu_worker.engine.attention.cpu_paged import CpuPagedBackend
from gpu_worker.engine.cpu.fused_layer import fuse_layers, num_trial_blocks
from gpu_worker.engine.cpu.packed_linear import can_round, round_rows
from gpu_worker.engine.model import encoder_decoder
from gpu_worker.engine.model.families import register_family
from gpu_worker.engine.model.model import DeepStack, Draft, LoadContext, LoadedModel
from gpu_worker.engine.model.passes import PASSES
from gpu_worker.engine.model.quantized_linears import check_fp8
from gpu_worker.engine.model.vision import load_tower
from gpu_worker.engine.model.warmup import count_room, max_captured_tokens
from gpu_worker.engine.model.weights import cannot_serve, read_config
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.parallel.model_parallel import read_weights
from gpu_worker.engine.parallel.rendezvous import Member
from gpu_worker.protocol import UnservableModel, first_cause

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCK_SIZES = {"cpu": 16, "cuda": 64}
STATES_BLOCK_SIZE = 256
"""In a model without attention, whose blocks hold nothing: they only count tokens."""
DraftLoader = Callable[[LoadedModel, model_files.Progress], Draft | None]
"""(the model without a cache, progress) → what proposes tokens."""


@torch.inference_mode()
def load(
    settings: Settings,
    progress: model_files.Progress,
    communicator: Communicator,
    load_draft: DraftLoader,
) -> LoadedModel:
    """Load the model, and what proposes tokens beside it. Raises SettingError if the settings cannot be
    served, before weights are read if possible.
    """
    device = choose_device(settings.device, communicator.info)
    dtype = choose_dtype(settings.dtype, device)
    if settings.int8_activations and not (device.type == "cpu" and can_round(dtype)):
        need = "AVX2, VNNI or Arm's dot products, and no matrix unit for the dtype, which is faster and exact"
        raise SettingError(
            "int8_activations", f"not for {name_of(dtype)} on this {device.type}: it needs {need}"
        )
    path = model_files.resolve(settings.model_id, settings.revision, progress, dtype=name_of(dtype))
    if communicator.links and not communicator.info.is_local:
        description = describe_model(path, settings, name_of(dtype), device.type)
        check_same(settings.model_id, communicator.exchange(description), communicator.links.members)
    context = LoadContext(path, None, dtype, device, settings, communicator, read_pooling(path, settings))
    if context.is_encoder and settings.dtype == "auto" and device.type == "cpu":
        dtype = context.dtype = torch.float32  # an index that others have made has such vectors
    report_progress(progress)
    threads = f", {plural(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    progress(f"loading {settings.model_name} as {name_of(dtype)} on {device.type}{threads}")
    context.config = config = read_config(path, settings)
    is_decoder = not (context.is_encoder or config.is_encoder_decoder)
    loaded = read_model(context)
    loaded.draft = draft = load_draft(loaded, progress) if is_decoder else None
    if draft and draft.cached:  # a block has room for its K and V, too
        loaded.geometry = replace(loaded.geometry, draft_bytes=draft.cached.geometry.block_bytes)
    attach_empty(loaded)
    num_blocks = count_room(loaded)
    num_fused = try_to_fuse(loaded)
    if loaded.num_deep:
        loaded.deepstack = DeepStack(loaded.model.model.layers[: loaded.num_deep])
    loaded.attach(num_blocks)
    if settings.deterministic and is_decoder and (reason := nondeterministic_because(loaded, num_fused)):
        raise SettingError(
            "deterministic", f"{settings.model_id} as {name_of(dtype)} on {device.type}: {reason}"
        )
    return loaded


def attach_empty(loaded: LoadedModel) -> None:
    """Attach an empty cache, and have the ranks agree on what their backends do."""
    loaded.attach(0)
    if loaded.backend.capturable:
        loaded.backend.agree(loaded.communicator.exchange)


def read_model(context: LoadContext) -> LoadedModel:
    """Read this rank's part of a model, still without a cache, and change it by all passes. Raises
    SettingError.
    """
    settings, kind = context.settings, context.config.model_type
    check_fp8(context.config, settings, context.device, context.dtype)
    register_family(kind)
    try:
        if context.config.is_encoder_decoder:
            return encoder_decoder.load(context, settings.block_size or BLOCK_SIZES[context.device.type])
        model, context.plan, context.stage = read_weights(context)
        context.tower = load_tower(context, context.stage.is_first)
        stage, num_deep = context.stage, context.tower.family.num_deep if context.tower else 0
        if stage.is_first and stage.num_stages > 1 and stage.end < num_deep:
            deep = f"its first {num_deep} layers take embeddings of pictures, and would be in several stages"
            raise UnservableModel(f"{deep} (PIPELINE_PARALLEL_SIZE)")
        for change in PASSES:
            change(model, context)
    except KeyError as error:
        cause = f"the code of {kind} fails: {error!r}"
        if error.args == (NAME,):  # it looks attention up in a table of its own
            cause = f"the attention of {kind} cannot be replaced"
        raise cannot_serve(settings.model_id, UnservableModel(cause)) from error
    except (UnservableModel, ValueError, OSError) as error:
        raise cannot_serve(settings.model_id, error) from error
    return assemble(model, context)


def assemble(model: Any, context: LoadContext) -> LoadedModel:
    """The model with its attention backend, still without a cache."""
    settings, path, device, layers = context.settings, context.path, context.device, context.layers
    block_size = settings.block_size or (BLOCK_SIZES[device.type] if layers else STATES_BLOCK_SIZE)
    kv_dtype = FLOATS8.get(settings.kv_cache_dtype, context.dtype)
    length = int(model_files.context_length(path) * (settings.rope_factor or 1))
    if context.pooling and context.is_encoder:
        length = context.pooling.max_tokens
    geometry = Geometry(list(layers.values()), block_size, context.dtype, kv_dtype)
    max_rows = max_captured_tokens(settings.max_batch_size)
    backend = choose_backend(geometry, device, max_rows, -(-length // block_size))
    return LoadedModel.of(context, model=model, backend=backend, context=length)


def try_to_fuse(loaded: LoadedModel) -> int:
    """Fuse layers on CPU → how many. From then on rows are rounded if INT8_ACTIVATIONS says so."""
    num_fused = 0
    if isinstance(loaded.backend, CpuPagedBackend):
        loaded.backend.adapters = loaded.adapters
        loaded.attach(num_trial_blocks(loaded.geometry.block_size), loaded.geometry.unrounded)
        num_deep = loaded.num_deep
        # each of the first layers hands its output on to what adds embeddings of pictures
        apart = [*(loaded.draft.recorded if loaded.draft else ())]
        apart += loaded.model.model.layers[: num_deep + 1] if num_deep else []
        num_fused = fuse_layers(loaded.model, loaded.backend, loaded.forward, loaded.context, apart)
    if loaded.settings.int8_activations:
        round_rows(loaded.model)
    return num_fused


def nondeterministic_because(loaded: LoadedModel, num_fused: int) -> str:
    """Why a token's bits may depend on what else runs; empty if they do not."""
    if loaded.states:
        return "its states are computed with those of the rows beside them"
    if loaded.device.type != "cuda":
        layers = len(loaded.geometry.layers)
        fused = f"{num_fused} of its {layers} layers run in kernels that compute each token by itself"
        return fused if num_fused < layers else ""
    experts = any(weight.dim() == 3 for weight in loaded.model.parameters())
    return first_cause(
        (loaded.communicator.world_size > 1, "it runs on several ranks"),
        (loaded.settings.enforce_eager, "ENFORCE_EAGER keeps its steps from being captured"),
        (not loaded.capturable, "its steps cannot be captured"),
        (not loaded.backend.plan_free, "attention is split by the lengths of all rows in a step"),
        # tokens of prompts are computed as rows that decode, and would get their frequencies
        (loaded.ropes, "its rotary frequencies depend on the length of the prompt"),
        (experts, "its experts' products have shapes that depend on the batch"),
        (loaded.adapters, "the products of LoRA adapters (ENABLE_LORA) depend on the batch"),
    )


def report_progress(progress: model_files.Progress) -> None:
    """Report the progress bars of transformers as lines."""
    bar_of = model_files.progress_lines(progress)
    transformers_logging.set_tqdm_hook(lambda _, args, options: bar_of(*args, **options))


def threads_of(settings: Settings, communicator: Communicator) -> int:
    """This rank's part of the machine's cores."""
    return max(1, machine.num_cores() // max(1, settings.num_workers * communicator.info.local_world_size))


def choose_device(name: str, info: RankInfo) -> torch.device:
    """The device of this rank. Raises SettingError if torch does not see it."""
    if name == "cpu":  # and CUDA stays uninitialised: a template could not be copied
        return torch.device("cpu")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise SettingError("device", "cuda, but torch sees no CUDA device")
    if not available:
        return torch.device("cpu")
    local_rank = info.local_rank
    if torch.cuda.device_count() == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ","):
        local_rank = 0  # what has started this rank shows it its own GPU only
    if local_rank >= torch.cuda.device_count():
        raise SettingError(
            "num_shard",
            f"{info.local_world_size}, but torch sees {plural(torch.cuda.device_count(), 'CUDA device')}",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the processor is fast at it, else float32."""
    if name == "auto":
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else machine.has_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    return DTYPES[name]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


EQUAL_SETTINGS = (
    *("block_size", "deterministic", "enable_lora", "enforce_eager", "int8_activations", "kv_cache_dtype"),
    *("load_format", "max_batch_size", "max_batch_prefill_tokens", "max_cpu_loras", "max_lora_rank"),
    *("max_loras", "prefix_caching", "quantize", "rope_factor", "rope_scaling", "runner", "speculate"),
    "speculative_config",
)
"""Settings by which ranks compute the same steps; how the model is split, they have compared before."""


def describe_model(path: Path, settings: Settings, dtype: str, device: str) -> dict[str, str]:
    """What must be the same at all ranks: settings, and digests of files."""
    return {
        **model_files.file_digests(path, settings.makes_weights),
        **{name: str(getattr(settings, name)) for name in EQUAL_SETTINGS},
        **{name: str(bool(getattr(settings, name))) for name in ("kv_cache_bytes", "lora_adapters")},
        "version": version("tokenfleet"),
        "device": device,
        "dtype": dtype,
    }


def check_same(model_id: str, descriptions: Sequence[Mapping[str, str]], members: Sequence[Member]) -> None:
    """Raises SettingError with the first difference to rank 0, and where it is."""
    for description, member in zip(descriptions, members, strict=True):
        for name, _ in sorted(description.items() ^ descriptions[0].items()):
            setting = name if name in Settings.model_fields else "model_id"
            raise SettingError(setting, f"{name} of {model_id} at {member} is not that of {members[0]}")
