"""Fused layers: whole decoder layers in one native call, where a layer has the shape that Llama made common.

A layer is replaced if it consists of exactly the known parts, and the native layer computes the same as its
own code in a trial: inputs of several sizes on a few tokens. Every other layer stays as it is. Layers that
follow each other become one call, if the model then computes the same bits. Hidden states are [1, tokens,
hidden] of the weights' dtype, logits [tokens, vocabulary].
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from gpu_worker.engine.attention.cpu_paged import CpuPagedBackend
from gpu_worker.engine.batch.inputs import Inputs, build_inputs
from gpu_worker.engine.batch.row import Row, RowSlice, StepSlices
from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.packed_linear import NativeLinear

TRIAL_TOKENS = 8
TRIAL_TOLERANCES = {torch.float32: (1e-4, 1e-6), torch.bfloat16: (3e-2, 4e-3)}
"""By dtype: the tolerated error, as a share of what a layer adds to its input, and of its output."""
NEAR_POSITIONS = torch.arange(TRIAL_TOKENS)[None]
TRIAL_SCALES = (0.1, 1.0, 30.0)
"""Of the random states on which layers are compared."""
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class LayerCall(NamedTuple):
    """One call of a decoder layer.

    Attributes:
        arguments: the positional ones: hidden states [1, TRIAL_TOKENS, hidden].
        options: the named ones.
        output: [1, TRIAL_TOKENS, hidden]
    """

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    output: Any


def num_trial_blocks(block_size: int) -> int:
    return -(-TRIAL_TOKENS // block_size)


def trial_inputs(model: Any, block_size: int, context: int) -> Inputs:
    """A prompt in the first blocks. Its positions span the whole context: some models have factors that
    depend on them.
    """
    blocks = np.arange(1, 1 + num_trial_blocks(block_size), dtype=np.int32)
    ids = np.arange(TRIAL_TOKENS, dtype=np.int32) * 7 % model.config.get_text_config().vocab_size
    row = RowSlice(Row(0, ids, 1, blocks), 0, TRIAL_TOKENS, samples=True)
    prompt = build_inputs(StepSlices([row]), block_size, torch.device("cpu"))
    positions = torch.linspace(0, context - 1, TRIAL_TOKENS).long()
    return replace(prompt, positions=positions[None])


def record_calls(layers: Iterable[Any], run: Callable[[], object]) -> dict[Any, LayerCall]:
    """The calls that `run` makes of the layers, of those layers that are called as most models call them."""
    seen: dict[Any, LayerCall] = {}

    def record(module: Any, arguments: Any, options: Any, output: Any) -> None:
        seen[module] = LayerCall(arguments, options, output)

    hooks = [layer.register_forward_hook(record, with_kwargs=True) for layer in layers]
    if hooks:
        run()
    for hook in hooks:
        hook.remove()
    return {layer: call for layer, call in seen.items() if is_usual_call(call)}


def is_usual_call(call: LayerCall) -> bool:
    """Hidden states in, hidden states out, and one pair of cosines and sines beside them."""
    embeddings = call.options.get("position_embeddings")
    if len(call.arguments) != 1 or not torch.is_tensor(call.output) or not isinstance(embeddings, tuple):
        return False
    tensors = (*call.arguments, call.output, *embeddings)
    return (
        len(tensors) == 4
        and len({tensor.dtype for tensor in tensors}) == 1
        and all(tensor.is_contiguous() and tensor.shape[:2] == (1, TRIAL_TOKENS) for tensor in tensors)
    )


def is_close(output: torch.Tensor, expected: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether two layers computed the same from `states`; all [1, tokens, hidden] of one dtype."""
    of_added, of_output = TRIAL_TOLERANCES[expected.dtype]
    bound = of_added * (expected.float() - states.float()).norm() + of_output * expected.float().norm()
    return bool((output.float() - expected.float()).norm() <= bound)


class FusedLayers:
    """The forward of layers that follow each other."""

    def __init__(
        self,
        layers: list[ctypes.Structure],
        weights: list[torch.Tensor | None],
        arguments: CpuPagedBackend,
    ) -> None:
        self.layers = (native.structs["Layer"] * len(layers))(*layers)
        self.weights = weights  # the structs point into their memory
        self.arguments = arguments
        self.dtype = arguments.dtype
        self.run = arguments.library.tf_layers

    @classmethod
    def of(cls, layer: Any, arguments: CpuPagedBackend, rotary: int) -> "FusedLayers":
        """One layer. `rotary`: numbers of a head that are rotated."""
        attention, mlp = layer.self_attn, layer.mlp
        linears = [getattr(attention, f"{name}_proj") for name in "qkvo"]
        linears += [getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")]
        modules = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            *(getattr(attention, name, None) for name in ("q_norm", "k_norm")),
        )
        weights = [norm and norm.weight.detach().float().contiguous() for norm in modules]
        norms = [
            native.structs["Norm"](weight.data_ptr(), epsilon_of(module))
            if module
            else native.structs["Norm"](None, 0.0)
            for module, weight in zip(modules, weights, strict=True)
        ]
        struct = native.structs["Layer"](
            ctypes.addressof(arguments.caches[attention]),
            *(ctypes.addressof(linear.struct) for linear in linears),
            *norms,
            rotary,
        )
        return cls([struct], weights, arguments)

    @classmethod
    def joined(cls, parts: Sequence["FusedLayers"]) -> "FusedLayers":
        """All of them in one call."""
        return cls(
            [layer for part in parts for layer in part.layers],
            [weight for part in parts for weight in part.weights],
            parts[0].arguments,
        )

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **rest: Any,
    ) -> torch.Tensor:
        """hidden_states [1, tokens, hidden], cosines and sines [1, tokens, rotary], all in the weights' dtype
        → hidden states
        """
        cosines, sines = position_embeddings
        states = hidden_states.clone()
        self.run(
            self.dtype,
            self.arguments.step,
            self.layers,
            len(self.layers),
            cosines.data_ptr(),
            sines.data_ptr(),
            states.data_ptr(),
        )
        return states


def pass_through(hidden_states: torch.Tensor, **rest: Any) -> torch.Tensor:
    """The forward of a layer that a call before it computes. hidden_states [1, tokens, hidden], any dtype"""
    return hidden_states


def fuse_layers(
    model: Any,
    arguments: CpuPagedBackend,
    forward: Callable[[Inputs], torch.Tensor],
    context: int,
    apart: Sequence[Any] = (),
) -> int:
    """Replace the forward of the layers that have a native equal; return how many.

    `forward` → logits [tokens, vocabulary] of any dtype; `context` is the longest sequence in tokens; a call
    begins with each layer `apart`. The cache has the blocks of a trial, in the model's dtype: 8-bit floats
    would make much of the little by which two codes of a layer differ.
    """
    known = [one for one in model.modules() if child_names(one) == LAYER and has_known_parts(one)]
    run = partial(forward, trial_inputs(model, arguments.block_size, context))
    found = {
        layer: fused
        for layer, call in record_calls(known, run).items()
        if (fused := find_equal(layer, arguments, call))
    }
    set_forwards(found)
    if found:
        join_layers(found, run, apart)
    return len(found)


def join_layers(
    fused: dict[Any, FusedLayers], run: Callable[[], torch.Tensor], apart: Sequence[Any] = ()
) -> None:
    """Make one call of all, or of those up to each layer `apart`; `run` → logits [tokens, vocabulary] of any
    dtype. Where layers follow each other in other ways than they are listed in, the logits of `run` show it,
    and each keeps its own call.
    """
    expected = run()
    forwards: dict[Any, Callable[..., torch.Tensor]] = {}
    for first, *others in groups_of(list(fused), apart):
        joined = FusedLayers.joined([fused[layer] for layer in (first, *others)])
        forwards |= {first: joined, **dict.fromkeys(others, pass_through)}
    set_forwards(forwards)
    if not torch.equal(run(), expected):
        set_forwards(fused)


def groups_of(layers: Sequence[Any], apart: Sequence[Any]) -> list[list[Any]]:
    """Layers that follow each other, in groups that begin with those `apart`."""
    groups: list[list[Any]] = []
    for layer in layers:
        if not groups or any(layer is one for one in apart):
            groups.append([])
        groups[-1].append(layer)
    return groups


def set_forwards(forwards: Mapping[Any, Callable[..., torch.Tensor]]) -> None:
    for layer, forward in forwards.items():
        layer.forward = forward


def find_equal(layer: Any, arguments: CpuPagedBackend, call: LayerCall) -> FusedLayers | None:
    """The native layer that computes what this one does, if there is one. Some models leave positions out of
    some layers: so it is tried with and without rotation.
    """
    (states,) = call.arguments
    nearer = {
        name: NEAR_POSITIONS if name == "position_ids" else value for name, value in call.options.items()
    }
    if not torch.equal(layer(states, **nearer), call.output):
        return None  # its own code uses positions; rounding may hide the difference on so few tokens
    random = torch.Generator().manual_seed(0)
    noise = (torch.randn(states.shape, generator=random) * scale for scale in TRIAL_SCALES)
    inputs = [states, *(tensor.to(states.dtype) for tensor in noise)]
    expected = [layer(tensor, **call.options) for tensor in inputs]
    rotary = call.options["position_embeddings"][0].shape[2]
    sizes = (rotary, 0) if rotary <= arguments.caches[layer.self_attn].key_dim else (0,)
    for fused in [FusedLayers.of(layer, arguments, size) for size in sizes]:
        outputs = [fused(tensor, **call.options) for tensor in inputs]
        if all(map(is_close, outputs, expected, inputs)):
            return fused
    return None


# --- structure ----------------------------------------------------------------------------------------------


def has_known_parts(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    if (
        child_names(attention) not in (ATTENTION, ATTENTION | HEAD_NORMS)
        or child_names(mlp) != MLP
        or not parameter_names(attention) <= {"sinks"}
    ):
        return False
    linears = [getattr(attention, name) for name in ATTENTION]
    linears += [getattr(mlp, name) for name in MLP - {"act_fn"}]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in child_names(attention) & HEAD_NORMS]
    return (
        all(type(linear) is NativeLinear for linear in linears)
        and all(is_rms_norm(norm) for norm in norms)
        and all(is_unchanged(part) for part in layer.modules())
    )


def child_names(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def parameter_names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(recurse=False)}


def is_unchanged(module: nn.Module) -> bool:
    """Whether its class alone says what it computes."""
    return "forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks


def is_rms_norm(module: nn.Module) -> bool:
    return (
        parameter_names(module) == {"weight"}
        and module.weight.dim() == 1  # type: ignore[operator]
        and epsilon_of(module) > 0
    )


def epsilon_of(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", None)) or 0.0)
