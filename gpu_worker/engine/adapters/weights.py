"""The weights of a LoRA adapter: reads `adapter_model.safetensors`, checked against the model's layers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpu_worker.engine.adapters.config import AdapterConfig, AdapterError, read_adapter_config
from gpu_worker.engine.adapters.targets import LoraTarget, is_elsewhere, names_of
from gpu_worker.engine.parallel.shards import mixer_prefixes

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN = (".lora_A.weight", ".lora_embedding_A")
UP = (".lora_B.weight", ".lora_embedding_B")
FROZEN = ".base_layer.weight"
"""PEFT saves the base model's embedding and head, too, where an adapter has matrices for them."""
MAX_NAMED = 3
"""Layers that an error names."""
Stamp = tuple[int, int, int]
"""What changes with a file: its inode, size and time of the last change."""


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """What an adapter adds to a layer: down [rank, inputs], up [outputs, rank], with its scaling; both
    float32. Those of an embedding have the same shapes: its inputs are ids.
    """

    down: torch.Tensor
    up: torch.Tensor

    @property
    def rank(self) -> int:
        return len(self.down)


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The weights of an adapter in memory of the host, as the device takes them.

    Attributes:
        rank: the largest of any layer, of whatever stage.
        layers: by the name of a target: what its store has packed.
    """

    rank: int
    num_bytes: int
    layers: Mapping[str, Any]


def stamp_of(folder: Path) -> Stamp:
    """Raises OSError."""
    found = (folder / WEIGHTS_FILE).stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_pairs(
    folder: Path, model: Any, targets: Mapping[str, LoraTarget], max_rank: int
) -> Iterator[tuple[LoraTarget | None, LowRankPair]]:
    """Yield what an adapter has for each layer, with the target, None where it is in another stage. Raises
    AdapterError.
    """
    config, file = read_adapter_config(folder), folder / WEIGHTS_FILE
    if not file.exists():
        raise AdapterError(f"{folder} has no {WEIGHTS_FILE}; pickled weights (.bin) are not read")
    try:
        with safe_open(file, framework="pt") as opened:
            keys = list(opened.keys())
            for layer, (down, up) in layers_of(keys).items():
                target = find_target(layer, model, targets)
                if (frozen := f"{PREFIX}{layer}{FROZEN}") in keys:
                    check_vocabulary(layer, opened.get_slice(frozen).get_shape(), target)
                tensors = opened.get_tensor(down), opened.get_tensor(up)
                yield target, make_pair(layer, *tensors, config, max_rank, target)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise AdapterError(f"{file} is damaged or no safetensors file: {error}") from error


def layers_of(keys: list[str]) -> dict[str, tuple[str, str]]:
    """By the names of layers: the names of their two matrices. Raises AdapterError."""
    halves: list[dict[str, str]] = [
        {key.removeprefix(PREFIX).removesuffix(end): key for key in keys for end in ends if key.endswith(end)}
        for ends in (DOWN, UP)
    ]
    downs, ups = halves
    known = {*downs.values(), *ups.values()}
    if others := sorted(key for key in keys if key not in known and not key.endswith(FROZEN)):
        raise AdapterError(f"it has {listed(others)}, which is not served; only matrices A and B are")
    if alone := sorted(downs.keys() ^ ups.keys()):
        raise AdapterError(f"it has one of two matrices only for {listed(alone)}")
    if not downs:
        raise AdapterError("it has no matrices")
    return {layer: (downs[layer], ups[layer]) for layer in sorted(downs)}


def find_target(layer: str, model: Any, targets: Mapping[str, LoraTarget]) -> LoraTarget | None:
    """The target of a layer; None if another stage has it. Raises AdapterError if none has."""
    names = list(names_of(layer))
    found = next((targets[name] for name in names if name in targets), None)
    if found is None and any(name.startswith(mixer_prefixes(model)) for name in names):
        raise AdapterError(f"it has matrices for {layer}, which has states, and adapters change none such")
    if found is None and not any(is_elsewhere(model, name) for name in names):
        raise AdapterError(f"it has matrices for {layer}, and this model has no such linear layer")
    return found


def check_vocabulary(layer: str, shape: list[int], target: LoraTarget | None) -> None:
    """Raises AdapterError if it was trained with another vocabulary: `shape` of the layer's weights."""
    if target and sorted(shape) != sorted((target.inputs, target.outputs)):
        raise AdapterError(f"it was trained with a {layer} of {shape}: tokens that were added are not served")


def make_pair(
    layer: str,
    down: torch.Tensor,
    up: torch.Tensor,
    config: AdapterConfig,
    max_rank: int,
    target: LoraTarget | None,
) -> LowRankPair:
    """A layer's matrices, A [rank, inputs] and B [outputs, rank] of any float dtype. Raises AdapterError."""
    if down.dim() != 2 or up.dim() != 2 or not (down.is_floating_point() and up.is_floating_point()):
        raise AdapterError(f"the matrices of {layer} are no matrices of floats")
    rank = config.rank_of(layer)
    if (len(down), up.shape[1]) != (rank, rank):
        found = f"{list(down.shape)} and {list(up.shape)}"
        raise AdapterError(f"the matrices of {layer} are {found}, and the config says rank {rank}")
    if rank > max_rank:
        raise AdapterError(f"the rank of {layer} is {rank}, more than MAX_LORA_RANK ({max_rank})")
    if target and (down.shape[1], len(up)) != (target.inputs, target.outputs):
        found, own = f"{down.shape[1]} → {len(up)}", f"{target.inputs} → {target.outputs}"
        raise AdapterError(f"the matrices of {layer} are for {found} features, and the model has {own}")
    pair = LowRankPair(down.float(), up.float() * config.scaling(layer))
    if not (pair.down.isfinite().all() and pair.up.isfinite().all()):
        raise AdapterError(f"the matrices of {layer} have numbers that are not finite")
    return pair


Pack = Callable[[LoraTarget, torch.Tensor, torch.Tensor], Any]
"""(target, down [rank, inputs], up [outputs, rank], float32, both this rank's part) → as the device takes
them; it has `nbytes`.
"""


Settle = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""What was packed of all layers → where it stays."""


def read_adapter(
    folder: Path, model: Any, targets: Mapping[str, LoraTarget], max_rank: int, pack: Pack, settle: Settle
) -> AdapterWeights:
    """Read an adapter. Raises AdapterError."""
    rank, layers = 0, {}
    for target, pair in read_pairs(folder, model, targets, max_rank):
        rank = max(rank, pair.rank)
        if target:
            layers[target.name] = pack(target, *target.part(pair.down, pair.up * target.scale))
    return AdapterWeights(rank, sum(packed.nbytes for packed in layers.values()), settle(layers))


def listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
