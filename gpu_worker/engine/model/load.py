"""Loading: from settings to a model on its device, with a KV cache on its attention modules."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from common import model_files
from common.pooling import PoolingConfig, read_pooling
from common.process import machine
from common.process.logs import plural
from common.rank import RankInfo
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.adapters.layers import AdapterLayers, make_adapter_layers
from gpu_worker.engine.attention.choose import PROBE_TOKENS, choose_backend, probe_attention
from gpu_worker.engine.attention.cpu_paged import CpuPagedBackend
from gpu_worker.engine.attention.kv_cache import FLOATS8, Geometry, LayerSpec, keep_latents
from gpu_worker.engine.cpu.fused_layer import fuse_layers, num_trial_blocks
from gpu_worker.engine.cpu.packed_linear import pack_linears
from gpu_worker.engine.cuda.linear import fuse_linears
from gpu_worker.engine.model import encoder_decoder, rope
from gpu_worker.engine.model.config import cannot_serve, quantizes, read_config
from gpu_worker.engine.model.deepstack import DeepStack
from gpu_worker.engine.model.encoder import load_encoder
from gpu_worker.engine.model.families import page_attention, register_family
from gpu_worker.engine.model.kv_budget import count_room, scale_layers
from gpu_worker.engine.model.model import Draft, LoadedModel
from gpu_worker.engine.model.quantized_linears import (
    check_fp8,
    find_blocks,
    quantize_blocks,
    replace_linears,
    shard_blocks,
    use_fp8,
)
from gpu_worker.engine.model.same_model import check_same, describe_model
from gpu_worker.engine.model.vision import PICTURE_CACHE_BYTES, load_tower
from gpu_worker.engine.model.warmup import (
    max_captured_tokens,
    max_decoded_tokens,
    max_prompt_tokens,
    peak_bytes,
)
from gpu_worker.engine.model.weights import read_weights
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.parallel.shards import TpPlan
from gpu_worker.engine.parallel.stages import WHOLE, ModelStage, checked_layers, learn_form
from gpu_worker.engine.parallel.tensor_parallel import connect_shards, read_shard
from gpu_worker.engine.pictures.encoder import VisionTower
from gpu_worker.engine.pooling.head import replace_head
from gpu_worker.engine.quantization.at_load import ROUNDINGS
from gpu_worker.engine.quantization.blocks import Blocks
from gpu_worker.engine.states.mixers import find_mixers
from gpu_worker.engine.states.model_states import ModelStates
from gpu_worker.protocol import UnservableModel, first_cause

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCK_SIZES = {"cpu": 16, "cuda": 64}
STATES_BLOCK_SIZE = 256
"""In a model without attention, whose blocks hold nothing: they only count tokens."""
DraftLoader = Callable[[Settings, Path, LoadedModel, Communicator, model_files.Progress], Draft | None]
"""(settings, the model's directory, the model without a cache, ranks, progress) → what proposes tokens."""


def no_draft(*_: object) -> None:
    """No model proposes tokens."""


@torch.inference_mode()
def load(
    settings: Settings,
    progress: model_files.Progress,
    communicator: Communicator,
    load_draft: DraftLoader = no_draft,
) -> LoadedModel:
    """Load the model, and what proposes tokens beside it. Raises SettingError if the settings cannot be
    served, before weights are read if possible.
    """
    device = choose_device(settings.device, communicator.info)
    dtype = choose_dtype(settings.dtype, device)
    path = model_files.resolve(settings.model_id, settings.revision, progress, dtype=name_of(dtype))
    if communicator.links and not communicator.info.is_local:
        description = describe_model(path, settings, name_of(dtype), device.type)
        check_same(settings.model_id, communicator.exchange(description), communicator.links.members)
    torch.set_num_threads(settings.threads or threads_of(settings, communicator))
    pooling = read_pooling(path, settings)
    is_encoder = pooling is not None and pooling.is_encoder
    if is_encoder and settings.dtype == "auto" and device.type == "cpu":
        dtype = torch.float32  # vectors are compared with those of an index that others have made
    report_progress(progress)
    threads = f", {plural(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    progress(f"loading {settings.model_name} as {name_of(dtype)} on {device.type}{threads}")
    if pooling and is_encoder:
        block_size = settings.block_size or BLOCK_SIZES[device.type]
        return load_encoder(settings, path, pooling, dtype, device, communicator, block_size)
    config = read_config(path, settings)
    check_fp8(config, settings, device, dtype)
    register_family(config.model_type)
    if config.is_encoder_decoder:
        return load_encoder_decoder(settings, path, config, dtype, device, communicator)
    read = read_model(path, config, dtype, device, settings, communicator, pooling)
    loaded = assemble(settings, path, config, read, dtype, device)
    loaded.pooling, loaded.vector_size = pooling, read.vector_size
    loaded.add_draft(load_draft(settings, path, loaded, communicator, progress))
    attach_empty(loaded, communicator)
    kept_bytes = PICTURE_CACHE_BYTES if loaded.tower else 0
    room = count_room(settings, loaded, communicator, lambda: peak_bytes(loaded, settings), kept_bytes)
    loaded.states.num_slots, loaded.states.num_snapshots = room.num_slots, room.num_snapshots
    num_fused = try_to_fuse(loaded)
    loaded.deepstack = make_deepstack(loaded)
    loaded.attach(room.num_blocks)
    if settings.deterministic and (
        reason := nondeterministic_because(settings, loaded, num_fused, communicator)
    ):
        raise SettingError(
            "deterministic", f"{settings.model_id} as {name_of(dtype)} on {device.type}: {reason}"
        )
    return loaded


def attach_empty(loaded: LoadedModel, communicator: Communicator) -> None:
    """Attach an empty cache, and have the ranks agree on what their backends do."""
    loaded.attach(0)
    if loaded.backend.capturable:
        loaded.backend.agree(communicator.all_reduce_min)  # type: ignore[attr-defined]


def make_deepstack(loaded: LoadedModel) -> DeepStack | None:
    """What adds embeddings of pictures to the first layers; None where the model has no such."""
    if not loaded.num_deep:
        return None
    return DeepStack(loaded.model.model.layers[: loaded.num_deep])


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A rank's part of a model on its device, with linear layers that are fast there.

    Attributes:
        layers: what its attention keeps of a token.
        stage: which part of the model this is.
        states: what rows keep beside the cache.
        tower: what encodes pictures; None of a model for text.
        adapters: where LoRA adapters lie on the device; None: it takes none.
        vector_size: values of a vector, of a model that pools.
    """

    model: Any
    layers: dict[Any, LayerSpec]
    stage: ModelStage
    states: ModelStates
    tower: VisionTower | None
    adapters: AdapterLayers | None
    vector_size: int


def read_model(
    path: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    settings: Settings,
    communicator: Communicator,
    pooling: PoolingConfig | None = None,
) -> ReadModel:
    """Read this rank's part of a model; with `pooling` it makes vectors. Raises SettingError."""
    vector_size = 0
    try:
        if communicator.world_size > 1:
            model, plan, stage = read_shard(
                path, config, dtype, device, settings, communicator, needs_head=pooling is None
            )
        else:
            model = read_weights(path, config, dtype, device, settings, needs_head=pooling is None)
            plan, stage = TpPlan({}, {}), WHOLE
        if pooling:
            plan, vector_size = replace_head(model, plan, stage, path, pooling)
        blocks = read_blocks(path, config, model, device, settings)
        blocks = shard_blocks(blocks, plan.shards, communicator.tp_rank)
        keep_latents(model)
        use_fp8(model, path, config, device, settings, plan.shards, communicator.tp_rank)
        tower = load_tower(path, dtype, device, settings, stage.is_first)
        if tower:
            check_deep_layers(tower, stage)
        if settings.quantize and settings.quantize in ROUNDINGS and quantizes(config, settings):
            blocks = quantize_blocks(model, settings.quantize, device)
        optimize_linears(model, device, blocks)
        most = max_prompt_tokens(settings.max_batch_prefill_tokens, device)
        most += max_decoded_tokens(settings.max_batch_size)
        adapters = make_adapter_layers(model, plan.shards, communicator.tp_rank, settings, device, most)
        connect_shards(model, plan, communicator)
        page_attention(model)
        mixers = find_mixers(model)
        learn_form(model, stage, lambda: probe_forward(model, stage, device))
        layers = probe_attention(
            model,
            lambda: mixers.record(lambda: probe_forward(model, stage, device)),
            stage.part_of(config.num_hidden_layers),
        )
        if settings.kv_cache_dtype in FLOATS8 and not settings.makes_weights:
            layers = scale_layers(model, path, layers)
    except KeyError as error:  # model code that looks attention up in a table of its own
        cause = UnservableModel(f"the attention of {config.model_type} cannot be replaced")
        raise cannot_serve(settings.model_id, cause) from error
    except (UnservableModel, ValueError, OSError) as error:
        raise cannot_serve(settings.model_id, error) from error
    states = ModelStates(device, mixers.kept, packs=mixers.packs)
    return ReadModel(model, layers, stage, states, tower, adapters, vector_size)


def check_deep_layers(tower: VisionTower, stage: ModelStage) -> None:
    """Raises UnservableModel if layers that take embeddings of pictures are in several stages."""
    if stage.is_first and stage.num_stages > 1 and stage.end < tower.family.num_deep:
        cause = f"its first {tower.family.num_deep} layers take embeddings of pictures, and would be in"
        raise UnservableModel(f"{cause} several stages (PIPELINE_PARALLEL_SIZE)")


def load_encoder_decoder(
    settings: Settings,
    path: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    communicator: Communicator,
) -> LoadedModel:
    """Load an encoder-decoder model. Raises SettingError."""
    block_size = settings.block_size or BLOCK_SIZES[device.type]
    try:
        loaded = encoder_decoder.load(settings, path, config, dtype, device, communicator, block_size)
    except (UnservableModel, ValueError, OSError) as error:
        raise cannot_serve(settings.model_id, error) from error
    loaded.attach(0)
    loaded.attach(
        count_room(settings, loaded, communicator, partial(peak_bytes, loaded, settings)).num_blocks
    )
    return loaded


def assemble(
    settings: Settings,
    path: Path,
    config: Any,
    read: ReadModel,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedModel:
    """The model with its attention backend and rotary modules, still without a cache."""
    read.states.attach()
    block_size = settings.block_size or (BLOCK_SIZES[device.type] if read.layers else STATES_BLOCK_SIZE)
    kv_dtype = FLOATS8.get(settings.kv_cache_dtype, dtype)
    context = int(model_files.context_length(path) * (settings.rope_factor or 1))
    tokenizer = model_files.find_tokenizer(settings.tokenizer_name, path)
    geometry = Geometry(list(read.layers.values()), block_size, dtype, kv_dtype)
    max_rows = max_captured_tokens(settings.max_batch_size)
    backend = choose_backend(geometry, device, max_rows, -(-context // block_size))
    return LoadedModel(
        tokenizer=tokenizer,
        model=read.model,
        attentions=list(read.layers),
        geometry=backend.geometry,
        device=device,
        backend=backend,
        ropes=rope.replace_ropes(read.model),
        context=context,
        eos_ids=model_files.eos_ids(path, tokenizer),
        vocab_size=config.vocab_size,
        recompute_length=rope.recompute_length(read.model),
        stage=read.stage,
        states=read.states,
        adapters=read.adapters,
        tower=read.tower,
        axis_rope=rope.find_axis_rope(read.model, read.tower.family.mrope_axes if read.tower else ()),
    )


def read_blocks(
    path: Path, config: Any, model: Any, device: torch.device, settings: Settings
) -> Mapping[str, Blocks]:
    """The blocks of the checkpoint that the device can multiply."""
    changed = settings.makes_weights or quantizes(config, settings)
    return {} if changed else find_blocks(path, config, model, device)


def optimize_linears(model: Any, device: torch.device, blocks: Mapping[str, Blocks]) -> None:
    """Replace linear layers by faster ones, and move the model to the device. `blocks`: by names of
    layers.
    """
    if device.type == "cpu":
        pack_linears(model, blocks)
    else:
        replace_linears(model, blocks)
        model.to(device)
        fuse_linears(model)


def try_to_fuse(loaded: LoadedModel) -> int:
    """Fuse layers on CPU → how many."""
    if not isinstance(loaded.backend, CpuPagedBackend):
        return 0
    loaded.backend.adapters = loaded.adapters.native if loaded.adapters else None
    loaded.attach(num_trial_blocks(loaded.geometry.block_size), loaded.geometry.unrounded)
    num_deep = loaded.num_deep
    # each of the first layers hands its output on to what adds embeddings of pictures
    apart = [*(loaded.draft.recorded if loaded.draft else ())]
    apart += loaded.model.model.layers[: num_deep + 1] if num_deep else []
    return fuse_layers(loaded.model, loaded.backend, loaded.forward, loaded.context, apart)


def nondeterministic_because(
    settings: Settings, loaded: LoadedModel, num_fused: int, communicator: Communicator
) -> str:
    """Why a token's bits may depend on what else runs; empty if they do not."""
    if loaded.states:
        return "its states are computed with those of the rows beside them"
    if loaded.device.type != "cuda":
        layers = len(loaded.geometry.layers)
        fused = f"{num_fused} of its {layers} layers run in kernels that compute each token by itself"
        return fused if num_fused < layers else ""
    experts = any(weight.dim() == 3 for weight in loaded.model.parameters())
    return first_cause(
        (communicator.world_size > 1, "it runs on several ranks"),
        (settings.enforce_eager, "ENFORCE_EAGER keeps its steps from being captured"),
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


def probe_forward(model: Any, stage: ModelStage, device: torch.device) -> torch.Tensor:
    """→ logits [1, PROBE_TOKENS, vocabulary], in a stage before the last hidden states [1, PROBE_TOKENS,
    hidden]; of any dtype. The first of the states that a stage would receive is NaN.
    """
    positions = torch.arange(PROBE_TOKENS, device=device)[None]
    stage.try_out(model, PROBE_TOKENS, device)
    stage.states[:, :1] = torch.nan
    with checked_layers(stage):
        return stage.run(model, input_ids=torch.zeros_like(positions), position_ids=positions)


def threads_of(settings: Settings, communicator: Communicator) -> int:
    """This rank's part of the machine's cores."""
    return max(1, machine.num_cores() // max(1, settings.num_workers * communicator.info.local_world_size))


def choose_device(name: str, info: RankInfo) -> torch.device:
    """The device of this rank. Raises SettingError if torch does not see it."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise SettingError("device", "cuda, but torch sees no CUDA device")
    if not available or name == "cpu":
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
