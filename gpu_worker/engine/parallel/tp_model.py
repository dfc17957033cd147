"""Tensor parallel model: one rank's part of a model, connected to the other ranks' parts.

The part is a smaller model of the same class, with plain tensors. What its plan splits comes together in a
few modules, whose `forward` sums or gathers the ranks' results (arXiv:1909.08053).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.parallel.shards import (
    EMBEDDING,
    GATHERED,
    SPLIT,
    SUMMED,
    TensorShards,
    TpPlan,
)

Forward = Callable[..., torch.Tensor]


def sharded_class(whole: type[Any], shards: Mapping[str, TensorShards], rank: int) -> type[Any]:
    """The class of a model → a class whose models are a rank's part: `shards` by parameter, [...] of any
    dtype. It keeps the name by which transformers finds its conversions.
    """

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        whole.__init__(self, *arguments, **options)
        shrink_parameters(self, shards, rank)

    return type(whole.__name__, (whole,), {"__init__": __init__, "__module__": whole.__module__})


def shrink_parameters(model: Any, shards: Mapping[str, TensorShards], rank: int) -> None:
    """Leave of each parameter [...] of any dtype, still without values, as much as the rank holds."""
    for name, own in shards.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = model.get_parameter(name)
        begin, end = own.intervals[rank]
        shape = list(parameter.shape)
        shape[own.dim] = own.packed * (end - begin)
        setattr(module, leaf, nn.Parameter(parameter.new_empty(shape), requires_grad=False))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Embedding):
            module.num_embeddings, module.padding_idx = shape[0], None


def connect_shards(model: Any, plan: TpPlan, communicator: Communicator) -> None:
    """Make the ranks' parts compute what the whole model would, by the styles of transformers' plan."""
    rank = communicator.tp_rank
    for name, style in plan.styles.items():
        module = model.get_submodule(name)
        shards = plan.shards.get(f"{name}.weight")
        if style in SPLIT and shards:
            connect(module, split_input, own_inputs=shards.intervals[rank])
        if style in SUMMED:
            if rank and getattr(module, "bias", None) is not None:
                module.bias.data.zero_()  # a sum has it once
            connect(module, reduce_output, communicator=communicator)
        elif style in GATHERED and shards:
            sizes = tuple(end - begin for begin, end in shards.intervals)
            connect(module, gather_output, communicator=communicator, gathered_sizes=sizes)
        elif style == EMBEDDING and shards:
            connect(module, embed_shard, communicator=communicator, own_ids=shards.intervals[rank])


def connect(module: Any, forward: Forward, **attributes: Any) -> None:
    """Give a module another forward, which finds `attributes` on it and may call its own one."""
    for name, value in attributes.items():
        setattr(module, name, value)
    module.__class__ = connected_class(type(module), forward)  # type: ignore[arg-type]


@functools.cache
def connected_class(own: type[Any], forward: Forward) -> type[Any]:
    """A class with another forward, which gets the class's own one. Modules that are alike share it: torch
    compiles a layer anew for each attribute of an instance that is a function of its own.
    """

    def connected(self: Any, *inputs: Any, **options: Any) -> torch.Tensor:
        return forward(self, own.forward, *inputs, **options)

    return type(own.__name__, (own,), {"forward": connected, "__module__": own.__module__})


def reduce_output(module: Any, forward: Forward, *inputs: Any, **options: Any) -> torch.Tensor:
    """The sum of all ranks' outputs: [..., features] of the model's dtype."""
    return module.communicator.all_reduce(forward(module, *inputs, **options))  # type: ignore[no-any-return]


def gather_output(module: Any, forward: Forward, states: torch.Tensor) -> torch.Tensor:
    """states [..., inputs] of the model's dtype → all ranks' outputs side by side, [..., sum of sizes]"""
    return module.communicator.all_gather(forward(module, states), module.gathered_sizes)  # type: ignore[no-any-return]


def split_input(module: Any, forward: Forward, states: torch.Tensor) -> torch.Tensor:
    """states [..., inputs] of the model's dtype → the output of this rank's own part of them"""
    begin, end = module.own_inputs
    return forward(module, states[..., begin:end])


def embed_shard(module: Any, forward: Forward, ids: torch.Tensor) -> torch.Tensor:
    """ids int64 [1, tokens] → embeddings [1, tokens, hidden] of the model's dtype: ids of other ranks give
    zeros here, and the sum over the ranks is the embedding.
    """
    begin, end = module.own_ids
    elsewhere = (ids < begin) | (ids >= end)
    states = forward(module, (ids - begin).masked_fill(elsewhere, 0))
    return module.communicator.all_reduce(states.masked_fill(elsewhere[..., None], 0))  # type: ignore[no-any-return]
