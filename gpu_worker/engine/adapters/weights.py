"""The layers of a model that a LoRA adapter can change, and this rank's part of each; and the weights of an
adapter, read from `adapter_model.safetensors` and checked against these layers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from common.adapters import WEIGHTS, AdapterConfig, AdapterFault, read_config
from gpu_worker.engine.model.weights import TEXT_KEY_MAPPING, listed, renamed
from gpu_worker.engine.parallel.model_parallel import (
    Interval,
    RemoteEmbedding,
    RemoteLayer,
    TensorShards,
    intervals_of,
    mixer_prefixes,
)
from gpu_worker.protocol import refuse


@dataclass(frozen=True, slots=True, eq=False)
class LoraTarget:
    """A layer that an adapter can change.

    Attributes:
        inputs, outputs: features of the whole layer; the inputs of an embedding are its ids.
        own_inputs, own_outputs: intervals of them that this rank has.
        is_embedding: it takes ids.
        is_head: its inputs are the tokens whose logits are needed.
    """

    name: str
    module: Any
    inputs: int
    outputs: int
    own_inputs: Sequence[Interval]
    own_outputs: Sequence[Interval]
    is_embedding: bool = False
    is_head: bool = False

    @property
    def scale(self) -> float:
        """What the layer multiplies its outputs with, as Gemma's embedding does."""
        return float(getattr(self.module, "embed_scale", 1.0)) if self.is_embedding else 1.0

    @property
    def own_size(self) -> tuple[int, int]:
        """Inputs and outputs that this rank has."""
        own = self.own_inputs, self.own_outputs
        inputs, outputs = (sum(end - begin for begin, end in intervals) for intervals in own)
        return inputs, outputs

    def part(self, down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of `down` [rank, inputs] and `up` [outputs, rank], of any dtype."""
        own_down = torch.cat([down[:, begin:end] for begin, end in self.own_inputs], 1)
        return own_down, torch.cat([up[begin:end] for begin, end in self.own_outputs])


def find_targets(model: Any, shards: Mapping[str, TensorShards], rank: int) -> dict[str, LoraTarget]:
    """The targets in this rank's part of a model, by name. `shards`: how parameters [...] of any dtype are
    split between ranks.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    mixers = mixer_prefixes(model)  # they are called with parts of a step
    # attention over latents multiplies with a layer's weights without a call of it
    absorbed = {f"{name}.kv_b_proj" for name, module in model.named_modules() if hasattr(module, "expand_kv")}
    targets = {}
    for name, module in model.named_modules():
        size = size_of(module, embedding)
        if size is None or name in absorbed or ".experts." in name or name.startswith(mixers):
            continue
        is_embedding, sizes, own = module is embedding, [*size], [[(0, features)] for features in size]
        if split := shards.get(f"{name}.weight"):
            dim = (split.dim == 1) == is_embedding  # the weights of an embedding are [ids, features]
            sizes[dim] = whole = split.packed * split.intervals[-1][1]
            own[dim] = intervals_of(split, whole, rank)
        targets[name] = LoraTarget(
            name, module, sizes[0], sizes[1], own[0], own[1], is_embedding, module is head
        )
    return targets


def size_of(module: Any, embedding: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a layer; None for a module that is none."""
    if module is embedding and isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if type(module).__name__ == "Conv1D":  # of transformers: GPT-2's linear layers
        return int(module.nx), int(module.nf)
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else None  # type: ignore[return-value]


def is_elsewhere(model: Any, layer: str) -> bool:
    """Whether another stage has the layer."""
    module = model
    for part in layer.split("."):
        if isinstance(module, RemoteLayer | RemoteEmbedding):
            return True
        module = getattr(module, part, None)
        if module is None:
            return False
    return isinstance(module, RemoteLayer | RemoteEmbedding | nn.Identity)


PREFIX = "base_model.model."
DOWN = (".lora_A.weight", ".lora_embedding_A")
UP = (".lora_B.weight", ".lora_embedding_B")
FROZEN = ".base_layer.weight"
"""PEFT saves the base model's embedding and head, too, where an adapter has matrices for them."""


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """What an adapter adds to a layer: down [rank, inputs], up [outputs, rank], with its scaling; float32, or
    of the layer's dtype once it is packed, for native kernels with up [panels, rank, panel]. Those of an
    embedding have the same shapes: its inputs are ids.
    """

    down: torch.Tensor
    up: torch.Tensor

    @property
    def rank(self) -> int:
        return len(self.down)

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "LowRankPair":
        """The same in other memory."""
        return LowRankPair(move(self.down), move(self.up))


Packed = Mapping[str, LowRankPair]
"""The weights of an adapter in memory of the host, as the device takes them, by the names of targets."""


def stamp_of(folder: Path) -> tuple[int, ...]:
    """What changes with its weights: inode, size and time of the last change. Raises OSError."""
    found = (folder / WEIGHTS).stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_adapter(folder: Path, layers: Any) -> Packed:
    """Read an adapter for the layers of a model (adapters/layers.py). Raises AdapterFault."""
    config, file = read_config(folder), folder / WEIGHTS
    found: dict[str, LowRankPair] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            keys = set(opened.keys())
            for layer, names in layers_of(keys).items():
                target = find_target(layer, layers.model, layers.targets)
                if target and (frozen := f"{PREFIX}{layer}{FROZEN}") in keys:
                    check_vocabulary(layer, opened.get_slice(frozen).get_shape(), target)
                tensors = opened.get_tensor(names[0]), opened.get_tensor(names[1])
                pair = make_pair(layer, *tensors, config, layers.max_rank, target)
                if target and target.name in found:
                    raise AdapterFault(f"it has matrices for {layer} under two names")
                if target:
                    found[target.name] = pack_pair(pair, target, layers)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise AdapterFault(f"{file} is damaged or no safetensors file: {error}") from error
    return layers.settle(found)  # type: ignore[no-any-return]


def pack_pair(pair: LowRankPair, target: LoraTarget, layers: Any) -> LowRankPair:
    """This rank's part of what an adapter adds to a layer, as the device takes it. Raises AdapterFault."""
    packed: LowRankPair = layers.pack(target, *target.part(pair.down, pair.up * target.scale))
    if not (packed.down.isfinite().all() and packed.up.isfinite().all()):
        kind = str(packed.down.dtype).removeprefix("torch.")
        cause = f"the matrices of {target.name}, scaled as {kind}, have numbers that are not finite"
        raise AdapterFault(cause)
    return packed


def layers_of(keys: Collection[str]) -> dict[str, tuple[str, str]]:
    """By the names of layers: the names of their two matrices. Raises AdapterFault."""
    halves: list[dict[str, str]] = [
        {key.removeprefix(PREFIX).removesuffix(end): key for key in keys for end in ends if key.endswith(end)}
        for ends in (DOWN, UP)
    ]
    downs, ups = halves
    known = {*downs.values(), *ups.values()}
    others = sorted(key for key in keys if key not in known and not key.endswith(FROZEN))
    alone = sorted(downs.keys() ^ ups.keys())
    refuse(
        AdapterFault,
        (others, f"it has {listed(others)}, which is not served; only matrices A and B are"),
        (alone, f"it has one of two matrices only for {listed(alone)}"),
        (not downs, "it has no matrices"),
    )
    return {layer: (downs[layer], ups[layer]) for layer in sorted(downs)}


def find_target(layer: str, model: Any, targets: Mapping[str, LoraTarget]) -> LoraTarget | None:
    """The target of a layer; None if another stage has it. Raises AdapterFault if none has."""
    names = [layer, renamed(f"{layer}.", TEXT_KEY_MAPPING)[:-1]]
    found = next((targets[name] for name in names if name in targets), None)
    if found is None and any(name.startswith(mixer_prefixes(model)) for name in names):
        raise AdapterFault(f"it has matrices for {layer}, which has states, and adapters change none such")
    if found is None and not any(is_elsewhere(model, name) for name in names):
        raise AdapterFault(f"it has matrices for {layer}, and this model has no such linear layer")
    return found


def check_vocabulary(layer: str, shape: list[int], target: LoraTarget) -> None:
    """Raises AdapterFault if it was trained with another vocabulary: `shape` of the layer's weights."""
    if sorted(shape) != sorted((target.inputs, target.outputs)):
        raise AdapterFault(f"it was trained with a {layer} of {shape}: tokens that were added are not served")


def make_pair(
    layer: str,
    down: torch.Tensor,
    up: torch.Tensor,
    config: AdapterConfig,
    max_rank: int,
    target: LoraTarget | None,
) -> LowRankPair:
    """A layer's matrices, A [rank, inputs] and B [outputs, rank] of any float dtype. Raises AdapterFault."""
    if down.dim() != 2 or up.dim() != 2 or not (down.is_floating_point() and up.is_floating_point()):
        raise AdapterFault(f"the matrices of {layer} are no matrices of floats")
    rank, found = len(down), f"{down.shape[1]} → {len(up)}"
    own = f"{target.inputs} → {target.outputs}" if target else found
    refuse(
        AdapterFault,
        (up.shape[1] != rank, f"the matrices of {layer} are {list(down.shape)} and {list(up.shape)}"),
        (rank > max_rank, f"the rank of {layer} is {rank}, more than MAX_LORA_RANK ({max_rank})"),
        (own != found, f"the matrices of {layer} are for {found} features, and the model has {own}"),
    )
    return LowRankPair(down.float(), up.float() * config.scaling(layer, rank))
