"""The weights of a LoRA adapter: reads `adapter_model.safetensors`, checked against the model's layers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.adapters import AdapterConfig, AdapterFault, read_adapter_config
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


def stamp_of(folder: Path) -> Stamp:
    """Raises OSError."""
    found = (folder / WEIGHTS_FILE).stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_pairs(
    folder: Path, model: Any, targets: Mapping[str, LoraTarget], max_rank: int
) -> Iterator[tuple[LoraTarget | None, LowRankPair]]:
    """Yield what an adapter has for each layer, with the target, None where it is in another stage. Raises
    AdapterFault.
    """
    config, file = read_adapter_config(folder), folder / WEIGHTS_FILE
    if not file.exists():
        raise AdapterFault(f"{folder} has no {WEIGHTS_FILE}; pickled weights (.bin) are not read")
    try:
        with safe_open(file, framework="pt") as opened:
            keys = list(opened.keys())
            frozen_keys = {key for key in keys if key.endswith(FROZEN)}
            found = set()
            for layer, (down, up) in layers_of(keys).items():
                target = find_target(layer, model, targets)
                if target in found:
                    raise AdapterFault(f"it has matrices for {layer} under two names")
                found |= {target} if target else set()
                if (frozen := f"{PREFIX}{layer}{FROZEN}") in frozen_keys:
                    check_vocabulary(layer, opened.get_slice(frozen).get_shape(), target)
                tensors = opened.get_tensor(down), opened.get_tensor(up)
                yield target, make_pair(layer, *tensors, config, max_rank, target)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise AdapterFault(f"{file} is damaged or no safetensors file: {error}") from error


def layers_of(keys: list[str]) -> dict[str, tuple[str, str]]:
    """By the names of layers: the names of their two matrices. Raises AdapterFault."""
    halves: list[dict[str, str]] = [
        {key.removeprefix(PREFIX).removesuffix(end): key for key in keys for end in ends if key.endswith(end)}
        for ends in (DOWN, UP)
    ]
    downs, ups = halves
    known = {*downs.values(), *ups.values()}
    if others := sorted(key for key in keys if key not in known and not key.endswith(FROZEN)):
        raise AdapterFault(f"it has {listed(others)}, which is not served; only matrices A and B are")
    if alone := sorted(downs.keys() ^ ups.keys()):
        raise AdapterFault(f"it has one of two matrices only for {listed(alone)}")
    if not downs:
        raise AdapterFault("it has no matrices")
    return {layer: (downs[layer], ups[layer]) for layer in sorted(downs)}


def find_target(layer: str, model: Any, targets: Mapping[str, LoraTarget]) -> LoraTarget | None:
    """The target of a layer; None if another stage has it. Raises AdapterFault if none has."""
    names = list(names_of(layer))
    found = next((targets[name] for name in names if name in targets), None)
    if found is None and any(name.startswith(mixer_prefixes(model)) for name in names):
        raise AdapterFault(f"it has matrices for {layer}, which has states, and adapters change none such")
    if found is None and not any(is_elsewhere(model, name) for name in names):
        raise AdapterFault(f"it has matrices for {layer}, and this model has no such linear layer")
    return found


def check_vocabulary(layer: str, shape: list[int], target: LoraTarget | None) -> None:
    """Raises AdapterFault if it was trained with another vocabulary: `shape` of the layer's weights."""
    if target and sorted(shape) != sorted((target.inputs, target.outputs)):
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
    rank = len(down)
    if up.shape[1] != rank:
        raise AdapterFault(f"the matrices of {layer} are {list(down.shape)} and {list(up.shape)}")
    if rank > max_rank:
        raise AdapterFault(f"the rank of {layer} is {rank}, more than MAX_LORA_RANK ({max_rank})")
    if target and (down.shape[1], len(up)) != (target.inputs, target.outputs):
        found, own = f"{down.shape[1]} → {len(up)}", f"{target.inputs} → {target.outputs}"
        raise AdapterFault(f"the matrices of {layer} are for {found} features, and the model has {own}")
    return LowRankPair(down.float(), up.float() * config.scaling(layer, rank))


def read_adapter(folder: Path, layers: Any) -> Packed:
    """Read an adapter for the layers of a model (adapters/layers.py). Raises AdapterFault."""
    found = {}
    for target, pair in read_pairs(folder, layers.model, layers.targets, layers.max_rank):
        if target:
            packed = layers.pack(target, *target.part(pair.down, pair.up * target.scale))
            if not (packed.down.isfinite().all() and packed.up.isfinite().all()):
                kind = str(packed.down.dtype).removeprefix("torch.")
                raise AdapterFault(
                    f"the matrices of {target.name}, scaled as {kind}, have numbers that are not finite"
                )
            found[target.name] = packed
    return layers.settle(found)  # type: ignore[no-any-return]


def listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
