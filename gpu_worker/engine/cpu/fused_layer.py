"""Whole decoder layers in one native call, where a layer is of the shape that Llama made common.

A layer is taken over when it consists of exactly the known parts, and its own code gives the same on inputs
of several sizes. Every other layer stays as it is. Those that follow each other are one call, where the model
gives the same bits so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu_worker.engine.attention.cpu_paged import CpuPagedBackend
from gpu_worker.engine.batch.inputs import Inputs, build_inputs
from gpu_worker.engine.batch.rows import Row, RowSlice
from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.packed_linear import NativeLinear

TOKENS = 8  # of the prompt on which layers are compared
NEAR_POSITIONS = torch.arange(TOKENS)[None]
SCALES = (0.1, 1.0, 30.0)
TOLERANCES = {torch.float32: (1e-4, 1e-6), torch.bfloat16: (3e-2, 4e-3)}
"""Of what a layer adds to its input, and of its output."""
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class FusedLayers:
    """The forward of layers that follow each other."""

    def __init__(
        self, layers: list[native.LayerStruct], weights: list[torch.Tensor | None], backend: CpuPagedBackend
    ) -> None:
        self.layers, self.weights = (
            (native.LayerStruct * len(layers))(*layers),
            weights,
        )  # whose memory the former point to
        self.backend, self.dtype, self.run = backend, backend.dtype, backend.library.tf_layers

    @classmethod
    def of(cls, layer: Any, backend: CpuPagedBackend, rotary: int) -> "FusedLayers":
        """One layer. `rotary`: numbers of a head that are rotated."""
        attention, mlp = layer.self_attn, layer.mlp
        linears = [getattr(attention, f"{name}_proj").shape for name in "qkvo"]
        linears += [getattr(mlp, f"{name}_proj").shape for name in ("gate", "up", "down")]
        modules = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            *(getattr(attention, name, None) for name in ("q_norm", "k_norm")),
        )
        weights = [norm and norm.weight.detach().float().contiguous() for norm in modules]
        norms = [norm_of(module, weight) for module, weight in zip(modules, weights, strict=True)]
        return cls(
            [native.LayerStruct(backend.caches[attention], *linears, *norms, rotary)], weights, backend
        )

    @classmethod
    def joined(cls, parts: Sequence["FusedLayers"]) -> "FusedLayers":
        return cls(
            [layer for part in parts for layer in part.layers],
            [weight for part in parts for weight in part.weights],
            parts[0].backend,
        )

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **rest: Any,
    ) -> torch.Tensor:
        cosines, sines = position_embeddings
        states = hidden_states.clone()
        self.run(
            self.dtype,
            self.backend.step,
            self.layers,
            len(self.layers),
            cosines.data_ptr(),
            sines.data_ptr(),
            states.data_ptr(),
        )
        return states


def pass_through(hidden_states: torch.Tensor, **rest: Any) -> torch.Tensor:
    """The forward of a layer that one before it has computed."""
    return hidden_states


def norm_of(module: Any, weight: torch.Tensor | None) -> native.NormStruct:
    return (
        native.NormStruct(None, 0.0)
        if weight is None
        else native.NormStruct(weight.data_ptr(), epsilon(module))
    )


def fuse_layers(
    model: Any, backend: CpuPagedBackend, forward: Callable[[Inputs], torch.Tensor], context: int
) -> int:
    """`context`: the longest sequence in tokens → layers taken over."""
    run = partial(forward, trial_inputs(model, backend, context))
    found = [
        layer
        for layer in candidates(model)
        if len(layer.self_attn.keys) * backend.block_size > TOKENS + backend.block_size
    ]
    taken = {
        layer: fused
        for layer, call in record_calls(found, run).items()
        if (fused := find_equal(layer, backend, call))
    }
    set_forwards(taken)
    if taken:
        join_layers(taken, run)
    return len(taken)


def join_layers(taken: dict[Any, FusedLayers], logits: Callable[[], torch.Tensor]) -> None:
    """Where layers follow each other in other ways than they are listed in, the logits say so."""
    apart = logits()
    (first, *others), joined = taken, FusedLayers.joined(list(taken.values()))
    set_forwards({first: joined, **dict.fromkeys(others, pass_through)})
    if not torch.equal(logits(), apart):
        set_forwards(taken)


def set_forwards(forwards: Mapping[Any, Callable[..., torch.Tensor]]) -> None:
    for layer, forward in forwards.items():
        layer.forward = forward


# --- structure ----------------------------------------------------------------------------------------------


def candidates(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if child_names(module) == LAYER and has_known_parts(module))


def has_known_parts(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    if (
        child_names(attention) not in (ATTENTION, ATTENTION | HEAD_NORMS)
        or child_names(mlp) != MLP
        or not parameter_names(attention) <= {"sinks"}
    ):
        return False
    linears = [getattr(attention, name) for name in ATTENTION] + [
        getattr(mlp, name) for name in MLP - {"act_fn"}
    ]
    norms = [
        layer.input_layernorm,
        layer.post_attention_layernorm,
        *(getattr(attention, name) for name in child_names(attention) & HEAD_NORMS),
    ]
    parts = all(type(linear) is NativeLinear for linear in linears) and all(
        is_rms_norm(norm) for norm in norms
    )
    return parts and all(is_plain(part) for part in layer.modules())


def child_names(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def parameter_names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(recurse=False)}


def is_plain(module: nn.Module) -> bool:
    """Nobody has changed what it computes."""
    return "forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks


def is_rms_norm(module: nn.Module) -> bool:
    return parameter_names(module) == {"weight"} and module.weight.dim() == 1 and epsilon(module) > 0  # type: ignore[operator]


def epsilon(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", None)) or 0.0)


# --- comparison ---------------------------------------------------------------------------------------------


def record_calls(layers: list[Any], run: Callable[[], object]) -> dict[Any, tuple[Any, Any, Any]]:
    """Runs the model on a few tokens → positional arguments, named ones and the output of each layer that is
    called as most are.
    """
    seen: dict[Any, tuple[Any, Any, Any]] = {}

    def note(module: Any, arguments: Any, options: Any, output: Any) -> None:
        seen[module] = (arguments, options, output)

    if layers:
        hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
        run()
        for hook in hooks:
            hook.remove()
    return {layer: call for layer, call in seen.items() if is_usual_call(*call)}


def trial_inputs(model: Any, backend: CpuPagedBackend, context: int) -> Inputs:
    """A prompt in the first blocks, which nobody has been granted yet. Its positions span the whole context:
    some models have factors that depend on them.
    """
    blocks = np.arange(1, 1 + -(-TOKENS // backend.block_size), dtype=np.int32)
    ids = np.arange(TOKENS, dtype=np.int32) * 7 % model.config.get_text_config().vocab_size
    prompt = build_inputs(
        [RowSlice(Row(0, ids, 0, 1, blocks), 0, TOKENS, samples=True)],
        backend.block_size,
        torch.device("cpu"),
    )
    positions = torch.linspace(0, context - 1, TOKENS).long()
    return replace(prompt, positions=positions[None], lengths=positions + 1)


def is_usual_call(arguments: Any, options: Any, output: Any) -> bool:
    if (
        len(arguments) != 1
        or not torch.is_tensor(output)
        or not isinstance(options.get("position_embeddings"), tuple)
    ):
        return False
    tensors = (*arguments, output, *options["position_embeddings"])
    dtypes = {tensor.dtype for tensor in tensors}
    return (
        len(tensors) == 4
        and len(dtypes) == 1
        and all(tensor.is_contiguous() and tensor.shape[:2] == (1, TOKENS) for tensor in tensors)
    )


def find_equal(layer: Any, backend: CpuPagedBackend, call: tuple[Any, Any, Any]) -> FusedLayers | None:
    """The native layer that gives what this one does, if there is one. Some models leave positions out of
    some layers.
    """
    (states,), options, output = call
    nearer = {name: NEAR_POSITIONS if name == "position_ids" else value for name, value in options.items()}
    if not torch.equal(layer(states, **nearer), output):
        return None  # it looks at positions itself, which rounding may hide on so few tokens
    random = torch.Generator().manual_seed(0)
    inputs = [
        states,
        *((torch.randn(states.shape, generator=random) * scale).to(states.dtype) for scale in SCALES),
    ]
    expected = [layer(tensor, **options) for tensor in inputs]
    rotary = options["position_embeddings"][0].shape[2]
    has_known_parts = rotary <= backend.caches[layer.self_attn].key_dim
    for fused in [
        FusedLayers.of(layer, backend, size) for size in ((rotary, 0) if has_known_parts else (0,))
    ]:
        if all(
            is_close(fused(given, **options), wanted, given)
            for given, wanted in zip(inputs, expected, strict=True)
        ):
            return fused
    return None


def is_close(output: torch.Tensor, expected: torch.Tensor, given: torch.Tensor) -> bool:
    of_added, of_output = TOLERANCES[expected.dtype]
    bound = of_added * (expected.float() - given.float()).norm() + of_output * expected.float().norm()
    return bool((output.float() - expected.float()).norm() <= bound)
