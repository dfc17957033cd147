"""Tensor parallel model: one rank's part of a model, connected to the other ranks' parts.

The part is a smaller model of the same class, with plain tensors. What its plan splits comes together in a
few modules, whose `forward` sums or gathers the ranks' results (arXiv:1909.08053).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.parallel.tp_plan import (
    EMBEDDING,
    GATHERED,
    SPLIT,
    SUMMED,
    Interval,
    TensorShards,
    TpPlan,
)

Forward = Callable[..., torch.Tensor]


def sharded_class(whole: type[Any], shards: Mapping[str, TensorShards], rank: int) -> type[Any]:
    """The class of a model → a class whose models are a rank's part: `shards` by
    parameter, [...] of any dtype. It keeps the name by which transformers
    finds its conversions.
    """

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        whole.__init__(self, *arguments, **options)
        shrink_parameters(self, shards, rank)

    return type(whole.__name__, (whole,), {"__init__": __init__, "__module__": whole.__module__})


def shrink_parameters(model: Any, shards: Mapping[str, TensorShards], rank: int) -> None:
    """Leaves of each parameter [...] of any dtype, still without values, as much as the rank holds."""
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
    """Makes the ranks' parts compute what the whole model would, by the styles of transformers' plan."""
    rank = communicator.rank
    for name, style in plan.styles.items():
        module = model.get_submodule(name)
        shards = plan.shards.get(f"{name}.weight")
        if style in SPLIT and shards:
            module.forward = partial(split_input, module.forward, shards.intervals[rank])
        if style in SUMMED:
            if rank and getattr(module, "bias", None) is not None:
                module.bias.data.zero_()  # a sum has it once
            module.forward = partial(reduce_output, module.forward, communicator)
        elif style in GATHERED and shards:
            sizes = [end - begin for begin, end in shards.intervals]
            module.forward = partial(gather_output, module.forward, communicator, sizes)
        elif style == EMBEDDING and shards:
            module.forward = partial(embed_shard, module.forward, communicator, shards.intervals[rank])


def reduce_output(forward: Forward, communicator: Communicator, *inputs: Any, **options: Any) -> torch.Tensor:
    """The sum of all ranks' outputs: [..., features] of the model's dtype."""
    return communicator.all_reduce(forward(*inputs, **options))


def gather_output(
    forward: Forward, communicator: Communicator, sizes: Sequence[int], states: torch.Tensor
) -> torch.Tensor:
    """states [..., inputs] of the model's dtype → all ranks' outputs side by side, [..., sum of sizes]"""
    return communicator.all_gather(forward(states), sizes)


def split_input(forward: Forward, own: Interval, states: torch.Tensor) -> torch.Tensor:
    """states [..., inputs] of the model's dtype → the output of this rank's own part of them"""
    return forward(states[..., own[0] : own[1]])


def embed_shard(
    forward: Forward, communicator: Communicator, own: Interval, ids: torch.Tensor
) -> torch.Tensor:
    """ids int64 [1, tokens] → embeddings [1, tokens, hidden] of the model's dtype: ids of other ranks give
    zeros here, and the sum over the ranks is the embedding.
    """
    begin, end = own
    elsewhere = (ids < begin) | (ids >= end)
    states = forward((ids - begin).masked_fill(elsewhere, 0))
    return communicator.all_reduce(states.masked_fill(elsewhere[..., None], 0))
