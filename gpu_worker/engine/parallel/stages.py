"""Which part of a model each stage of a pipeline has: layers in order, as many bytes for each as possible."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import nn

from gpu_worker.engine.parallel.shards import Interval
from gpu_worker.protocol import UnservableModel


def split_layers(
    layer_bytes: Sequence[int], first_bytes: int, last_bytes: int, num_stages: int
) -> list[Interval]:
    """Layers of each stage, such that the largest stage is as small as possible. `first_bytes` are what the
    first stage has before its layers, `last_bytes` what the last one has after them. Raises UnservableModel.
    """
    count = len(layer_bytes)
    if count < num_stages:
        raise UnservableModel(f"it has {count} layers, fewer than PIPELINE_PARALLEL_SIZE ({num_stages})")
    ends = list(accumulate(layer_bytes, initial=first_bytes))  # bytes up to a layer
    ends[0], ends[-1] = 0, ends[-1] + last_bytes

    @functools.cache
    def best(begin: int, stages: int) -> tuple[int, int, tuple[Interval, ...]]:
        """The largest stage of the layers from `begin` on, the sum of squares, which tells equal ones apart,
        and the stages' layers.
        """
        own = ((end, ends[end] - ends[begin]) for end in range(begin + 1, count - stages + 2))
        if stages == 1:
            size = ends[count] - ends[begin]
            return size, size * size, ((begin, count),)
        return min(join(size, (begin, end), best(end, stages - 1)) for end, size in own)

    return list(best(0, num_stages)[2])


def join(
    size: int, own: Interval, others: tuple[int, int, tuple[Interval, ...]]
) -> tuple[int, int, tuple[Interval, ...]]:
    largest, squares, intervals = others
    return max(size, largest), size * size + squares, (own, *intervals)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """How a model is split into stages.

    Attributes:
        layers: name of the list of layers.
        intervals: numbers of the layers of each stage.
        embedding: name of the embedding, which the first stage has.
        head: name of the module that makes logits.
        tail: names of what the last stage has after the layers, the head included.
        is_tied: the head multiplies with the weights of the embedding.
    """

    layers: str
    intervals: Sequence[Interval]
    embedding: str
    head: str
    tail: Sequence[str]
    is_tied: bool

    def layer_of(self, name: str) -> int | None:
        """The number of the layer that a parameter belongs to; None if it belongs to none."""
        found = re.match(rf"{re.escape(self.layers)}\.(\d+)\.", name)
        return int(found[1]) if found else None

    def has(self, stage: int, name: str) -> bool:
        """Whether a stage has a parameter. What is neither a layer nor before or after them, as tables of
        positions, each stage has.
        """
        layer = self.layer_of(name)
        if layer is not None:
            begin, end = self.intervals[stage]
            return begin <= layer < end
        if name.startswith(f"{self.embedding}."):
            return stage == 0
        return stage == len(self.intervals) - 1 or not name.startswith(
            tuple(f"{part}." for part in self.tail)
        )


def make_stage_plan(model: Any, num_stages: int) -> StagePlan:
    """The plan of a whole model, which may be on the meta device. Names come from transformers' `pp_plan`, or
    from the model's one list of layers. Raises UnservableModel.
    """
    names = {module: name for name, module in model.named_modules()}
    plan = list(model.pp_plan or {})
    layers = find_layers(model, plan)
    embedding, head = names[model.get_input_embeddings()], names.get(model.get_output_embeddings())
    if head is None:
        raise UnservableModel("it has no head that a last stage could have (PIPELINE_PARALLEL_SIZE)")
    after = plan[plan.index(layers) + 1 :] if layers in plan else []
    tail = [head, *(name for name in after if name != head)]
    layer_bytes = [num_bytes(layer) for layer in model.get_submodule(layers)]
    tail_bytes = sum(num_bytes(model.get_submodule(name)) for name in tail)
    intervals = split_layers(layer_bytes, num_bytes(model.get_submodule(embedding)), tail_bytes, num_stages)
    return StagePlan(layers, intervals, embedding, head, tail, bool(model.config.tie_word_embeddings))


def find_layers(model: Any, plan: Sequence[str]) -> str:
    """The name of the list of layers: the one that the plan names, else the only one of the right length."""
    lists = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and not re.search(r"\.\d+(\.|$)", name)
    }
    total = model.config.num_hidden_layers
    found = [name for name in lists if name in plan] or [
        name for name, count in lists.items() if count and total % count == 0
    ]
    if len(found) != 1:
        raise UnservableModel(
            "its layers are not one list, which could be split into stages (PIPELINE_PARALLEL_SIZE)"
        )
    return str(found[0])


def num_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
