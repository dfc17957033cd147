"""AWQ (arXiv:2306.00978): scales inputs with large values up before weights are rounded, and what gives these
inputs down, so that the layer stays the same.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gpu_worker.engine.quantizing.gptq import output_error
from gpu_worker.engine.quantizing.grid import Grid
from gpu_worker.engine.quantizing.inputs import LayerInputs

RATIOS = [step / 10 for step in range(10)]
"""Powers of the inputs' mean that are tried as scales."""
SAME = 1e-4
"""Relative difference of a layer's outputs that rounding in float32 explains."""
LEAST = 1e-4
"""The smallest mean of an input, relative to 1."""
GIVERS = {"down_proj": "up_proj", "o_proj": "v_proj", "w2": "w3", "fc2": "fc1"}
"""Names of linear layers → of the one beside it whose outputs are, times others, its inputs."""

Divide = Callable[[torch.Tensor], torch.Tensor]


def scale_inputs(
    layer: nn.Module, inputs: Sequence[LayerInputs], grid: Grid, size: int, run: Callable[[], torch.Tensor]
) -> None:
    """Scale the inputs of linear layers in place where that makes the rounding better. `run` computes the
    outputs of `layer` for some text, [1, tokens, ...] of float32: a scaling that changes them is undone.
    """
    for group in inputs:
        scales = best_scales(group, grid, size)
        if (scales == 1).all():
            continue
        expected = run()
        for divide in dividers(layer, group, scales):
            changed = divide()
            for linear in group.linears:
                linear.weight.mul_(scales)
            if (run() - expected).norm() <= SAME * expected.norm():
                group.hessian /= scales[:, None] * scales
                group.means /= scales
                break
            for linear in group.linears:
                linear.weight.div_(scales)
            for tensor, before in changed:
                tensor.copy_(before)


def best_scales(group: LayerInputs, grid: Grid, size: int) -> torch.Tensor:
    """The power of the inputs' means that gives the smallest error of the outputs, float32 [inputs]."""
    best, least = torch.ones_like(group.means), torch.inf
    for ratio in RATIOS:
        scales = group.means.clamp(min=LEAST * float(group.means.max())) ** ratio
        scales = scales / (scales.max() * scales.min()).sqrt()
        hessian = group.hessian / (scales[:, None] * scales)
        total = 0.0
        for linear in group.linears:
            weight = linear.weight * scales
            rounded = grid.round_groups(weight, size, shrinks=[1.0]).widen()
            total += float(output_error(weight - rounded, hessian))
        if total < least:
            best, least = scales, total
    return best


Change = tuple[torch.Tensor, torch.Tensor]
"""A tensor, and what it was."""


def dividers(
    layer: nn.Module, group: LayerInputs, scales: torch.Tensor
) -> Iterator[Callable[[], list[Change]]]:
    """Ways to divide what gives a group's inputs by scales, float32 [inputs]; each returns what it changed.
    A norm multiplies by its weight, or by 1 more than it.
    """
    giver: Any = group.giver or find_giver(layer, group.linears[0])
    if giver is None:
        return
    weight = giver.weight
    if weight.shape[0] != len(scales):
        return
    factors = scales if weight.dim() == 1 else scales[:, None]
    ways = [lambda own: own / factors]
    if weight.dim() == 1:
        ways.append(lambda own: (own + 1) / factors - 1)
    for way in ways:
        yield lambda way=way: divide(giver, way, scales)  # type: ignore[misc]


def divide(giver: Any, way: Divide, scales: torch.Tensor) -> list[Change]:
    """Divide a module's outputs: its weight in a `way`, and its bias by scales, float32 [outputs]."""
    bias = getattr(giver, "bias", None)
    tensors = [giver.weight, *([] if bias is None else [bias])]
    changed = [(tensor, tensor.clone()) for tensor in tensors]
    giver.weight.copy_(way(giver.weight))
    if bias is not None:
        bias.div_(scales)
    return changed


def find_giver(layer: nn.Module, linear: nn.Linear) -> nn.Module | None:
    """The linear layer beside `linear` in the model whose outputs are, times others, its inputs."""
    for parent in layer.modules():
        for name, child in parent.named_children():
            if child is linear:
                giver = getattr(parent, GIVERS.get(name, ""), None)
                return giver if type(giver) is nn.Linear else None
    return None
