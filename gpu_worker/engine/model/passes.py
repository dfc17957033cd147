"""Passes: all that changes transformers' model before it has a cache, in their order.

A pass takes the model and the context in which it is loaded. It finds what the passes before it have left,
and leaves in the context what later ones and the engine need. Attention calls `attend`
(attention/backend.py), a module with states calls `ModelStates.mix`; all else is transformers' own code, and
a breakpoint in the forward of a layer's class is hit in each step that is not captured. Once there is a
cache, layers on CPU may be fused (cpu/fused_layer.py), and embeddings of pictures are added to the first ones
(model.py).
"""

from collections.abc import Callable
from typing import Any

import torch

from gpu_worker.engine.adapters import AdapterLayers, find_targets, takes_adapters
from gpu_worker.engine.attention.backend import FLOATS8, PAST, keep_latents
from gpu_worker.engine.attention.backend import WHOLE as WHOLE_PROMPTS
from gpu_worker.engine.attention.choose import PROBE_TOKENS, probe_attention
from gpu_worker.engine.cpu.packed_linear import pack_linears, share_parameters
from gpu_worker.engine.cuda.linear import fuse_linears
from gpu_worker.engine.model.families import page_attention
from gpu_worker.engine.model.model import LoadContext
from gpu_worker.engine.model.quantized_linears import quantise_linears, quantised_weights
from gpu_worker.engine.model.rope import BY_LENGTH, AxisRope, PerTokenRope, types_of
from gpu_worker.engine.model.warmup import max_step_tokens, scale_layers
from gpu_worker.engine.parallel.model_parallel import (
    ModelStage,
    checked_layers,
    connect,
    connect_shards,
    take_states,
)
from gpu_worker.engine.pooling.head import pool_prompts, replace_head
from gpu_worker.engine.states.model_states import find_mixers


def head(model: Any, context: LoadContext) -> None:
    """Vectors take the place of a decoder's logits."""
    if context.pooling and not context.is_encoder:
        context.plan = replace_head(model, context.plan, context.stage, context.path, context.pooling)


def linears(model: Any, context: LoadContext) -> None:
    """Faster linear layers take the place of others. They multiply the checkpoint's quantised weights, or are
    rounded at load (QUANTIZE). The model is on its device from here on.
    """
    find = quantised_weights(model, context, context.plan.shards)
    if context.device.type == "cpu":
        pack_linears(model, find, context.settings.int8_activations)
    else:
        quantise_linears(model, find, context.device)
        model.to(context.device)
        fuse_linears(model)


def adapters(model: Any, context: LoadContext) -> None:
    """Layers add what LoRA adapters give. Ranks are not connected yet: it is a part of what they sum."""
    if takes_adapters(context.settings, context.device) and not context.is_encoder:
        targets = find_targets(model, context.plan.shards, context.communicator.tp_rank)
        most = max_step_tokens(context.settings, context.device)
        context.adapters = AdapterLayers(model, targets, context.settings, context.device, most)


def pool(model: Any, context: LoadContext) -> None:
    """An encoder's hidden states become vectors or scores."""
    if context.pooling and context.is_encoder:
        context.pooler = pool_prompts(model, context.path, context.pooling)


def states(model: Any, context: LoadContext) -> None:
    """Modules with states take those of rows. A forward shows what they and attention keep of a token."""
    kept, stage, device = context.states, context.stage, context.device
    find_mixers(model, kept)
    if not stage.is_first:
        connect(stage.first_layer, take_states)
    layers = probe_attention(
        model,
        lambda: kept.record(lambda: probe_forward(model, stage, device)),
        stage.part_of(context.config.num_hidden_layers),
        WHOLE_PROMPTS if context.is_encoder else PAST,
    )
    if context.settings.kv_cache_dtype in FLOATS8 and not context.settings.makes_weights:
        layers = scale_layers(model, context.path, layers)
    context.layers, kept.device = layers, device


def ropes(model: Any, context: LoadContext) -> None:
    """Rotary modules give each token the frequencies and the positions that it would have alone."""
    rotary = [module for module in model.modules() if types_of(module)]
    by_length = [module for module in rotary if {*BY_LENGTH} & {*types_of(module).values()}]
    context.ropes = [PerTokenRope(module) for module in by_length]
    axes = context.tower.family.mrope_axes if context.tower else ()
    context.axis_rope = AxisRope(rotary[0], axes) if rotary and axes else None


Pass = Callable[[Any, LoadContext], None]
PASSES: list[Pass] = [
    head,
    lambda model, _: keep_latents(model),  # while its linear layers are still plain
    linears,
    adapters,
    lambda model, context: connect_shards(model, context.plan, context.communicator),
    pool,
    lambda model, _: page_attention(model),
    states,
    ropes,
    lambda model, _: share_parameters(model),  # which can only be read from here on
]


def probe_forward(model: Any, stage: ModelStage, device: torch.device) -> torch.Tensor:
    """→ logits [1, PROBE_TOKENS, vocabulary], in a stage before the last hidden states [1, PROBE_TOKENS,
    hidden]; of any dtype. The first of the states that a stage would receive is NaN.
    """
    positions = torch.arange(PROBE_TOKENS, device=device)[None]
    stage.try_out(model, PROBE_TOKENS, device)
    stage.states[:, :1] = torch.nan
    with checked_layers(stage):
        return stage.run(model, input_ids=torch.zeros_like(positions), position_ids=positions)
