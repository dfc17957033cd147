"""Targets: the layers of a model that a LoRA adapter can change, and this rank's part of each."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_worker.engine.parallel.shards import Interval, TensorShards, intervals_of, mixer_prefixes
from gpu_worker.engine.parallel.stages import RemoteEmbedding, RemoteLayer

NAMES_IN_LARGER = (
    (re.compile(r"^language_model\.(model|lm_head)\b"), r"\1"),
    (re.compile(r"^model\.language_model\."), "model."),
)
"""Names of layers in models that see images, too → those in the model for text."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraTarget:
    """A layer that an adapter can change.

    Attributes:
        inputs, outputs: features of the whole layer; the inputs of an embedding are its ids.
        own_inputs, own_outputs: intervals that this rank has; None: all.
        is_embedding: it takes ids.
        is_head: its inputs are the tokens whose logits are needed.
    """

    name: str
    module: Any
    inputs: int
    outputs: int
    own_inputs: Sequence[Interval] | None = None
    own_outputs: Sequence[Interval] | None = None
    is_embedding: bool = False
    is_head: bool = False

    @property
    def scale(self) -> float:
        """What the layer multiplies its outputs with, as Gemma's embedding does."""
        return float(getattr(self.module, "embed_scale", 1.0)) if self.is_embedding else 1.0

    @property
    def own_size(self) -> tuple[int, int]:
        """Inputs and outputs that this rank has."""
        sizes = ((self.inputs, self.own_inputs), (self.outputs, self.own_outputs))
        inputs, outputs = (
            size if own is None else sum(end - begin for begin, end in own) for size, own in sizes
        )
        return inputs, outputs

    def part(self, down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of `down` [rank, inputs] and `up` [outputs, rank], of any dtype."""
        if self.own_inputs is not None:
            down = torch.cat([down[:, begin:end] for begin, end in self.own_inputs], 1)
        if self.own_outputs is not None:
            up = torch.cat([up[begin:end] for begin, end in self.own_outputs])
        return down, up


def find_targets(model: Any, shards: Mapping[str, TensorShards], rank: int) -> dict[str, LoraTarget]:
    """The targets in this rank's part of a model, by name. `shards`: how parameters [...] of any dtype are
    split between ranks.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    mixers = mixer_prefixes(model)  # they are called with parts of a step
    # attention over latents multiplies with a layer's weights without a call of it
    absorbed = {f"{name}.kv_b_proj" for name, module in model.named_modules() if hasattr(module, "expand_kv")}
    return {
        name: make_target(name, module, size, shards.get(f"{name}.weight"), rank, embedding, head)
        for module, name in names.items()
        if (size := size_of(module, embedding))
        and name not in absorbed
        and ".experts." not in name
        and not name.startswith(mixers)
    }


def size_of(module: Any, embedding: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a layer; None for a module that is none."""
    if module is embedding and isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if type(module).__name__ == "Conv1D":  # of transformers: GPT-2's linear layers
        return int(module.nx), int(module.nf)
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else None  # type: ignore[return-value]


def make_target(
    name: str,
    module: Any,
    size: tuple[int, int],
    shards: TensorShards | None,
    rank: int,
    embedding: Any,
    head: Any,
) -> LoraTarget:
    """A target whose part of this rank has these inputs and outputs; `shards`: how its weights [outputs,
    inputs] of any dtype are split.
    """
    is_embedding, is_head = module is embedding, module is head
    if shards is None:
        return LoraTarget(name, module, *size, is_embedding=is_embedding, is_head=is_head)
    whole = shards.packed * shards.intervals[-1][1]
    own = intervals_of(shards, whole, rank)
    if (shards.dim == 1) != is_embedding:  # the weights of an embedding are [ids, features]
        return LoraTarget(name, module, whole, size[1], own, None, is_embedding, is_head)
    return LoraTarget(name, module, size[0], whole, None, own, is_embedding, is_head)


def names_of(layer: str) -> Iterator[str]:
    """The names that an adapter's layer may have in the model."""
    yield layer
    for pattern, name in NAMES_IN_LARGER:
        if (other := pattern.sub(name, layer)) != layer:
            yield other


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
