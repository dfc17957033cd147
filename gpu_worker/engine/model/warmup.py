"""Warm-up: measures how long prompt tokens take, and so how many one step may have; runs the largest steps,
to measure their memory and to compile kernels before rows wait for them. And how many KV blocks, and states
of rows, a rank has room for; KV scales, which a checkpoint has for a cache of 8-bit floats.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.messages.request import SamplingParams
from common.process import machine
from common.process.logs import plural
from common.process.machine import run_delay_s
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.attention.backend import LayerSpec
from gpu_worker.engine.batch.row import Adapter, Row, RowSlice, StepSlices
from gpu_worker.engine.batch.sampling_state import SampleRequest, SamplingState
from gpu_worker.engine.batch.split_step import Forward
from gpu_worker.engine.cuda.graphs import FIXED_TOKENS, Capture, CudaGraphs, graph_sizes
from gpu_worker.engine.drafting.proposers import MAX_FORCED
from gpu_worker.engine.model.model import LoadedModel
from gpu_worker.engine.model.weights import TEXT_KEY_MAPPING, renamed
from gpu_worker.engine.pictures.encoder import PICTURE_CACHE_BYTES
from gpu_worker.engine.quantization.checkpoint import file_slices
from gpu_worker.engine.sampling.sampler import sample
from gpu_worker.protocol import UnservableModel

TARGET_STEP_MS = {"cpu": 4000.0, "cuda": 150.0}
"""How long the largest step may take. On CPU a burst of short prompts takes about that long; in parts, the
rows of each would pause for the next.
"""
NUM_MEASURED = 3
MANY_TOKENS = 16
TOKENS_MULTIPLE = 32
TIMED_TOKENS = {"cpu": 128, "cuda": 2048}
MAX_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Prompt tokens of the largest step, unless set otherwise: products of as many rows are bound by
arithmetic.
"""

PROPOSING_TOKENS = 256
"""Tokens up to which a step has room for all proposals of all rows: their logits take memory. As far as
reading weights from memory takes the time, such a step takes hardly longer than one of a single token.
"""
CAPTURED_PROMPT_TOKENS = 256
"""Tokens of prompts for which a captured step has room beside rows that decode."""


def max_prompt_tokens(setting: int | None, device: torch.device) -> int:
    """Prompt tokens that a step may ever have."""
    return setting or MAX_TOKENS[device.type]


def max_decoded_tokens(max_batch_size: int) -> int:
    """Tokens of rows that decode, and their proposals, that a step may ever have."""
    return max(max_batch_size, min((1 + MAX_FORCED) * max_batch_size, PROPOSING_TOKENS))


def max_captured_tokens(max_batch_size: int) -> int:
    """Tokens that a captured step may ever have."""
    return max_decoded_tokens(max_batch_size) + CAPTURED_PROMPT_TOKENS


def max_step_tokens(settings: Settings, device: torch.device) -> int:
    """Tokens that a step may ever have, the largest captured one included."""
    prompt_tokens = max_prompt_tokens(settings.max_batch_prefill_tokens, device)
    return max(prompt_tokens, CAPTURED_PROMPT_TOKENS) + max_decoded_tokens(settings.max_batch_size)


def token_ms(loaded: LoadedModel) -> float:
    """ms of one prompt token, in a step of many."""
    timed = min(TIMED_TOKENS[loaded.device.type], loaded.context)
    parts = prompt_parts(loaded, timed)
    return fastest_ms(lambda: loaded.compute(parts), loaded.device) / timed


def max_batch_prefill_tokens(token_ms: float, device: torch.device) -> int:
    """Prompt tokens of a step of TARGET_STEP_MS; a multiple of 32."""
    tokens = min(int(TARGET_STEP_MS[device.type] / token_ms), MAX_TOKENS[device.type])
    return max(TOKENS_MULTIPLE, tokens // TOKENS_MULTIPLE * TOKENS_MULTIPLE)


def fastest_ms(run: Callable[[], object], device: torch.device) -> float:
    """The ms of the fastest of several runs. On CPU the time in which other processes had the cores is left
    out, since it would lower the budget for the engine's whole life: threads that waited for cores may have
    waited at the same time, but each has computed its part.
    """
    times = []
    for _ in range(NUM_MEASURED):
        delay_s, cpu_s, began_s = run_delay_s(os.getpid()), time.process_time(), time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        delay_s = run_delay_s(os.getpid()) - delay_s
        undisturbed_s = min(took_s, max(took_s - delay_s, cpu_s / torch.get_num_threads()))
        times.append(undisturbed_s if device.type == "cpu" else took_s)
    return min(times) * 1e3


def measure_steps(work: Callable[[int], Callable[[], object]], device: torch.device) -> tuple[float, float]:
    """ms of a step of one token, and of each token more; `work` returns what runs a step of so many."""
    one_ms, many_ms = (fastest_ms(work(tokens), device) for tokens in (1, MANY_TOKENS))
    return one_ms, max(0.0, many_ms - one_ms) / (MANY_TOKENS - 1)


def run_largest_step(loaded: LoadedModel, tokens: int, rows: int) -> None:
    """Compute `tokens` prompt tokens, none of a row longer than the context, and sample `rows` rows twice:
    with the parameters that need most memory, and without any. Kernels are compiled at their first use, for
    which no row should wait.
    """
    full, rest = divmod(tokens, loaded.context)
    logits = loaded.compute(prompt_parts(loaded, *[loaded.context] * full, *([rest] if rest else [])))
    state = SamplingState(SamplingParams(temperature=1.0, typical_p=0.9))
    for request in (SampleRequest(state, 0), None):
        sample(logits.new_zeros(rows, logits.shape[1]), [request] * rows)


def capture_steps(loaded: LoadedModel, capture: Capture, max_rows: int, deterministic: bool) -> CudaGraphs:
    """Capture steps of few tokens; with `deterministic` one of a fixed shape. Where the cache has no blocks
    yet, rows have as many as their context needs.
    """
    tokens = (max_captured_tokens if loaded.computes_tokens_alone else max_decoded_tokens)(max_rows)
    tokens = FIXED_TOKENS if deterministic else tokens
    max_blocks = min(loaded.max_row_blocks, loaded.cache.num_blocks or loaded.max_row_blocks)
    samples = max(tokens, max_decoded_tokens(max_rows))
    graphs = CudaGraphs(loaded, tokens, max_blocks, samples, is_fixed=deterministic)
    longest = 1 if deterministic else max_blocks * loaded.geometry.block_size
    graphs.capture(capture, [tokens] if deterministic else graph_sizes(max_rows, tokens), longest)
    return graphs


def run_all_shapes(loaded: LoadedModel, forward: Forward) -> None:
    """Run one token, and several, and the same as steps with LoRA adapters if there are any: compilers make
    code for one, and for any number.
    """
    for adapter in (None, Adapter("")) if loaded.adapters else (None,):
        for tokens in (1, 2, 3, 16):
            parts = prompt_parts(loaded, tokens)
            parts[0].row.adapter = adapter
            forward(parts)


def prompt_parts(loaded: LoadedModel, *lengths: int) -> StepSlices:
    """The prefills of rows that own nothing but the scratch block."""
    ids = (np.arange(length, dtype=np.int32) % loaded.vocab_size for length in lengths)
    blocks = (np.zeros(-(-length // loaded.geometry.block_size), np.int32) for length in lengths)
    rows = [Row(0, own, 1, held) for own, held in zip(ids, blocks, strict=True)]
    return StepSlices([RowSlice(row, 0, len(row.ids), samples=True) for row in rows])


def peak_bytes(loaded: LoadedModel) -> int:
    """What the largest step allocates on CUDA, and what captured steps keep. The pool of graphs is memory of
    its own: no other step uses it, so both count.
    """
    settings = loaded.settings
    tokens = max_prompt_tokens(settings.max_batch_prefill_tokens, loaded.device)
    rows = max_decoded_tokens(settings.max_batch_size)
    largest_bytes = measure_peak(loaded.device, lambda: run_largest_step(loaded, tokens, rows))
    if (tower := loaded.tower) and tower.model:
        largest_bytes = max(largest_bytes, measure_peak(loaded.device, tower.try_out()))
    own_bytes = largest_bytes + captured_bytes(loaded)
    if loaded.draft is None:
        return own_bytes
    draft_bytes = peak_bytes(loaded.draft.cached) if loaded.draft.cached else 0
    return own_bytes + draft_bytes + max_step_tokens(settings, loaded.device) * loaded.draft.state_bytes


def captured_bytes(loaded: LoadedModel) -> int:
    """What captured steps keep: inputs, logits and plans of all sizes, and the memory in which the largest
    one computes, which the graphs' pool will hold. The steps are run, not captured.
    """
    settings = loaded.settings
    if settings.enforce_eager or not loaded.capturable:
        return 0

    def run_once(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    sizes = settings.max_batch_size, settings.deterministic
    return measure_peak(loaded.device, partial(capture_steps, loaded, run_once, *sizes))


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
    scales = {
        renamed(name, TEXT_KEY_MAPPING): tensor
        for name, tensor in file_slices(path)
        if name.endswith("_scale")
    }
    scaled = {
        module: replace(
            layer,
            key_scale=find_scale(scales, names[module], KEY_SCALES),
            value_scale=find_scale(scales, names[module], KEY_SCALES if layer.latent else VALUE_SCALES),
        )
        for module, layer in layers.items()
    }
    for module, layer in layers.items():
        if hasattr(module, "kv_lora_rank") and not layer.latent and scaled[module] != layer:
            raise UnservableModel("its KV scales are those of latents, and its cache keeps K and V")
    return scaled


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


def count_room(loaded: LoadedModel) -> int:
    """Count slots of states, which the model's states get, and the blocks that fit into memory beside them
    and the weights, the same on all ranks → the blocks, without the scratch block. Raises SettingError.

    KV_CACHE_BYTES is for all ranks together. Without it, on CUDA, the cache gets CUDA_MEMORY_FRACTION of the
    GPU without the weights and `peak_bytes`, which the largest step allocates. States come first: they are a
    fixed size for each row. Room is left for what is kept beside the cache: encoded pictures. Blocks that
    hold nothing, as an encoder's, only bound the tokens of rows.
    """
    settings, states, communicator = loaded.settings, loaded.states, loaded.communicator
    geometry, device = loaded.geometry, loaded.device
    is_whole = device.type == "cuda" and settings.kv_cache_bytes is None
    own_bytes = geometry.block_bytes + states.slot_bytes
    if loaded.is_encoder:
        return settings.max_batch_size * loaded.max_row_blocks
    if device.type == "cuda":
        left_bytes = cuda_bytes(device, settings.cuda_memory_fraction)
        available_bytes = max(
            0, left_bytes - peak_bytes(loaded) - int(FREE_SHARE * torch.cuda.mem_get_info(device)[1])
        )
    else:
        available_bytes = machine.available_bytes()
    available_bytes = max(0, available_bytes - (PICTURE_CACHE_BYTES if loaded.tower else 0))
    share_bytes = (
        available_bytes
        if is_whole
        else settings.cpu_cache_bytes * own_bytes // max(1, sum(communicator.exchange(own_bytes)))
    )
    if sum(communicator.exchange(states.slot_bytes)):
        slots = count_slots(loaded, share_bytes, settings.max_batch_size)
        states.num_slots = min(communicator.exchange(slots))
        left_bytes = share_bytes - slots_bytes(loaded, states.num_slots)
        if settings.prefix_caching and loaded.names_blocks:
            most = SNAPSHOTS_PER_ROW * states.num_slots
            if states.slot_bytes:  # a stage without states has room for any number
                most = min(most, min(left_bytes, share_bytes // SNAPSHOT_SHARE) // states.slot_bytes)
            states.num_snapshots = min(communicator.exchange(most))
        share_bytes = left_bytes - states.slot_bytes * states.num_snapshots
    num_blocks: int = min(communicator.exchange(geometry.num_blocks(share_bytes, available_bytes)))
    return min(num_blocks, states.num_kept * loaded.max_row_blocks) if states else num_blocks


def count_slots(loaded: LoadedModel, share_bytes: int, max_rows: int) -> int:
    """How many rows' states fit into `share_bytes`, and half of it if there is a KV cache, too. Raises
    SettingError.
    """
    most_bytes = share_bytes // 2 if loaded.layers else share_bytes
    slots = next((slots for slots in range(max_rows, 0, -1) if slots_bytes(loaded, slots) <= most_bytes), 0)
    if not slots:
        half = "half of " if loaded.layers else ""
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
