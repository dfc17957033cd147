"""Loading: from settings to a model on its device, with a KV cache on its attention modules."""

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from common import model_config, model_files
from common.process import machine
from common.process.logs import plural
from common.rank import RankInfo
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.attention.choose import PROBE_TOKENS, choose_backend, probe_attention
from gpu_worker.engine.attention.cpu_paged import CpuPagedBackend
from gpu_worker.engine.attention.kv_cache import FLOATS8, Geometry, LayerSpec
from gpu_worker.engine.attention.latents import keep_latents
from gpu_worker.engine.batch.inputs import build_inputs
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.cpu.fused_layer import fuse_layers, num_trial_blocks
from gpu_worker.engine.cpu.packed_linear import pack_linears
from gpu_worker.engine.cuda.linear import fuse_linears
from gpu_worker.engine.model import rope
from gpu_worker.engine.model.config import cannot_serve, quantizes, read_config
from gpu_worker.engine.model.families import page_attention, register_family
from gpu_worker.engine.model.kv_budget import count_blocks, measure_peak, scale_layers
from gpu_worker.engine.model.model import LoadedModel
from gpu_worker.engine.model.quantized_linears import (
    check_fp8,
    find_blocks,
    replace_linears,
    shard_blocks,
    use_fp8,
)
from gpu_worker.engine.model.same_model import check_same, describe_model
from gpu_worker.engine.model.tp_weights import read_shard
from gpu_worker.engine.model.warmup import (
    max_decoded_tokens,
    max_prompt_tokens,
    run_captured_steps,
    run_largest_step,
)
from gpu_worker.engine.model.weights import read_weights
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.parallel.shards import TpPlan
from gpu_worker.engine.parallel.stage_model import WHOLE, ModelStage, checked_layers, learn_form
from gpu_worker.engine.parallel.tp_model import connect_shards
from gpu_worker.engine.quantization.blocks import Blocks
from gpu_worker.protocol import UnservableModel, first_cause

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCK_SIZES = {"cpu": 16, "cuda": 64}


@torch.inference_mode()
def load(settings: Settings, progress: model_files.Progress, communicator: Communicator) -> LoadedModel:
    """Load the model. Raises SettingError if the settings cannot be served, before weights are read if
    possible.
    """
    device = choose_device(settings.device, communicator.info)
    dtype = choose_dtype(settings.dtype, device)
    path = model_files.resolve(settings.model_id, settings.revision, progress, dtype=name_of(dtype))
    if communicator.links and not communicator.info.is_local:
        description = describe_model(path, settings, name_of(dtype), device.type)
        check_same(settings.model_id, communicator.exchange(description), communicator.links.members)
    torch.set_num_threads(settings.threads or threads_of(settings, communicator))
    config = read_config(path, settings)
    check_fp8(config, settings, device, dtype)
    register_family(config.model_type)
    report_progress(progress)
    threads = f", {plural(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    progress(f"loading {settings.model_name} as {name_of(dtype)} on {device.type}{threads}")
    try:
        if communicator.world_size > 1:
            model, plan, stage = read_shard(path, config, dtype, device, settings, communicator)
        else:
            model, plan = read_weights(path, config, dtype, device, settings), TpPlan({}, {})
            stage = WHOLE
        blocks = read_blocks(path, config, model, device, settings)
        keep_latents(model)
        use_fp8(model, path, config, device, settings, plan.shards, communicator.tp_rank)
        optimize_linears(model, device, shard_blocks(blocks, plan.shards, communicator.tp_rank))
        connect_shards(model, plan, communicator)
        page_attention(model)
        learn_form(model, stage, lambda: probe_forward(model, stage, device))
        layers = probe_attention(
            model, lambda: probe_forward(model, stage, device), stage.part_of(config.num_hidden_layers)
        )
        if settings.kv_cache_dtype in FLOATS8 and not settings.makes_weights:
            layers = scale_layers(model, path, layers)
    except KeyError as error:  # model code that looks attention up in a table of its own
        cause = UnservableModel(f"the attention of {config.model_type} cannot be replaced")
        raise cannot_serve(settings.model_id, cause) from error
    except (UnservableModel, ValueError, OSError) as error:
        raise cannot_serve(settings.model_id, error) from error
    loaded = assemble(settings, path, config, model, layers, dtype, device, stage)
    loaded.attach(0)
    if loaded.backend.capturable:
        loaded.backend.agree(communicator.all_reduce_min)  # type: ignore[attr-defined]
    num_blocks = count_blocks(
        settings, loaded.geometry, device, communicator, lambda: peak_bytes(loaded, settings)
    )
    num_fused = try_to_fuse(loaded)
    loaded.attach(num_blocks)
    if settings.deterministic and (
        reason := nondeterministic_because(settings, loaded, num_fused, communicator)
    ):
        raise SettingError(
            "deterministic", f"{settings.model_id} as {name_of(dtype)} on {device.type}: {reason}"
        )
    return loaded


def assemble(
    settings: Settings,
    path: Path,
    config: Any,
    model: Any,
    layers: dict[Any, LayerSpec],
    dtype: torch.dtype,
    device: torch.device,
    stage: ModelStage,
) -> LoadedModel:
    """The model with its attention backend and rotary modules, still without a cache."""
    block_size = settings.block_size or BLOCK_SIZES[device.type]
    kv_dtype = FLOATS8.get(settings.kv_cache_dtype, dtype)
    context = int(model_config.context_length(path) * (settings.rope_factor or 1))
    tokenizer = model_files.find_tokenizer(settings.tokenizer_name, path)
    geometry = Geometry(list(layers.values()), block_size, dtype, kv_dtype)
    max_rows = max_decoded_tokens(settings.max_batch_size)
    backend = choose_backend(geometry, device, max_rows, -(-context // block_size))
    return LoadedModel(
        tokenizer=tokenizer,
        model=model,
        attentions=list(layers),
        geometry=backend.geometry,
        device=device,
        backend=backend,
        ropes=rope.replace_ropes(model),
        context=context,
        eos_ids=model_config.eos_ids(path, tokenizer),
        vocab_size=config.vocab_size,
        recompute_length=rope.recompute_length(model),
        stage=stage,
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
    loaded.attach(num_trial_blocks(loaded.geometry.block_size), loaded.geometry.unrounded)
    return fuse_layers(loaded.model, loaded.backend, loaded.forward, loaded.context)


def nondeterministic_because(
    settings: Settings, loaded: LoadedModel, num_fused: int, communicator: Communicator
) -> str:
    """Why a token's bits may depend on what else runs; empty if they do not."""
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
    )


def peak_bytes(loaded: LoadedModel, settings: Settings) -> int:
    """What the largest step allocates on CUDA, and what captured steps keep. The pool of graphs is memory of
    its own: no other step uses it, so both count.
    """
    block_size = loaded.geometry.block_size
    shape = (loaded.context, loaded.vocab_size, block_size)
    tokens = max_prompt_tokens(settings.max_batch_prefill_tokens, loaded.device)
    rows = max_decoded_tokens(settings.max_batch_size)

    def forward(slices: Sequence[RowSlice]) -> torch.Tensor:
        return loaded.forward(build_inputs(slices, block_size, loaded.device))

    largest_bytes = measure_peak(loaded.device, lambda: run_largest_step(forward, tokens, rows, *shape))
    return largest_bytes + captured_bytes(loaded, settings)


def captured_bytes(loaded: LoadedModel, settings: Settings) -> int:
    """What captured steps keep: tensors of all sizes, and the memory in which the largest one computes."""
    if settings.enforce_eager or not loaded.capturable:
        return 0
    run = partial(run_captured_steps, loaded, settings.max_batch_size, settings.deterministic)
    return measure_peak(loaded.device, run)


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
