"""Rounding: the weights of linear layers become integers with a scale and a zero for each group of inputs, by
GPTQ (arXiv:2210.17323) or after a scaling of inputs by AWQ (arXiv:2306.00978).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from common.settings.settings import SettingError

SHRINKS = [1 - step / 20 for step in range(11)]
"""Parts of a group's range that are tried: a narrower one clips the largest weights, and has finer steps."""
COLUMNS = 128
"""Inputs after which GPTQ changes the others, all at once."""
MAX_DAMPING = 1.0
POWERS = [step / 10 for step in range(10)]
"""Powers of the inputs' size that AWQ tries as scales."""
LEAST = 1e-4
"""The smallest size of an input, relative to the largest one."""
SAME = 1e-4
"""Relative difference of a layer's outputs that rounding in float32 explains."""
GIVERS = {"down_proj": "up_proj", "o_proj": "v_proj", "w2": "w3", "fc2": "fc1"}
"""Names of linear layers → of the one beside it whose outputs are, times others, its inputs."""


@dataclass(frozen=True)
class Rounded:
    """The weights of a layer as integers: (quant - zero) * scale.

    Attributes:
        quants: uint8 [outputs, inputs].
        scales: float32 [outputs, groups], numbers that the checkpoint's dtype has.
        zeros: float32 [outputs, groups], whole numbers.
    """

    quants: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def widen(self) -> torch.Tensor:
        """float32 [outputs, inputs]"""
        size = self.quants.shape[1] // self.scales.shape[1]
        scales, zeros = (table.repeat_interleave(size, 1) for table in (self.scales, self.zeros))
        return (self.quants.float() - zeros) * scales


@dataclass(frozen=True)
class Grid:
    """Integers from 0 to 2**bits - 1. In a `symmetric` grid the zero is the middle. Scales are numbers of
    `dtype`, and `size` inputs share one.
    """

    bits: int
    symmetric: bool
    dtype: torch.dtype
    size: int

    @property
    def highest(self) -> int:
        return int(2**self.bits) - 1

    def spread(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zeros for the range of each group, all float32 [..., 1]."""
        scales = ((high - low) / self.highest).to(self.dtype).float()
        scales = torch.where(scales > 0, scales, 1.0)
        if self.symmetric:
            return scales, torch.full_like(scales, (self.highest + 1) // 2)
        return scales, (-low / scales).round().clamp(0, self.highest)

    def quants(self, weights: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        """Whole numbers, float32 as the weights [..., numbers]."""
        return (weights / scales + zeros).round().clamp(0, self.highest)

    def round(self, weight: torch.Tensor, shrinks: Sequence[float] = SHRINKS) -> Rounded:
        """Round weights float32 [outputs, inputs] to the nearest integers, with the scales of `shrinks` for
        which the squared errors of a group are the least.
        """
        groups = weight.reshape(len(weight), -1, self.size)
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        if self.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scales, zeros = self.spread(low, high)
        least = torch.full_like(low, torch.inf)
        for shrink in shrinks:
            tried, at = self.spread(low * shrink, high * shrink)
            errors = ((self.quants(groups, tried, at) - at) * tried - groups).pow(2).sum(-1, keepdim=True)
            better = errors < least
            scales, zeros, least = (
                torch.where(better, new, old) for new, old in ((tried, scales), (at, zeros), (errors, least))
            )
        quants = self.quants(groups, scales, zeros).to(torch.uint8)
        return Rounded(quants.flatten(1), scales[..., 0], zeros[..., 0])


def output_error(error: torch.Tensor, hessian: torch.Tensor) -> float:
    """The mean squared error of a layer's outputs, summed over these, where its weights are wrong by `error`
    [outputs, inputs]; all float32.
    """
    return float(((error @ hessian) * error).sum())


# --- the inputs of layers


@dataclass(eq=False)
class LayerInputs:
    """The inputs of linear layers that get the same tensor.

    Attributes:
        linears: these layers.
        giver: the norm that returns the inputs as they are; None if none does.
        hessian: the mean of the inputs' outer products, float32 [inputs, inputs].
        count: how many inputs were seen.
    """

    linears: list[nn.Linear]
    giver: nn.Module | None
    hessian: torch.Tensor
    count: int = 0

    def add(self, rows: torch.Tensor) -> None:
        """Take inputs [..., inputs] of any dtype into the mean."""
        rows = rows.reshape(-1, rows.shape[-1]).float()
        self.count += len(rows)
        self.hessian.lerp_(rows.T @ rows / len(rows), len(rows) / self.count)


@dataclass(eq=False)
class InputRecorder:
    """Records the inputs of linear layers while a model runs; the first run says which share them."""

    groups: list[LayerInputs] = field(default_factory=list)
    of_linear: dict[nn.Module, LayerInputs] = field(default_factory=dict)
    outputs: list[tuple[torch.Tensor, nn.Module]] = field(default_factory=list)
    seen: list[tuple[torch.Tensor, LayerInputs]] = field(default_factory=list)

    def note_output(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.outputs.append((output, module))

    def note_input(self, linear: nn.Module, arguments: Any) -> None:
        rows = arguments[0]
        group = self.of_linear.get(linear) or next((own for it, own in self.seen if it is rows), None)
        if group is None:
            giver = next((module for output, module in self.outputs if output is rows), None)
            group = LayerInputs(
                [], giver, rows.new_zeros(rows.shape[-1], rows.shape[-1], dtype=torch.float32)
            )
            self.groups.append(group)
        if linear not in self.of_linear:
            group.linears.append(linear)  # type: ignore[arg-type]
            self.of_linear[linear] = group
        if linear is group.linears[0]:
            group.add(rows)
            self.seen.append((rows, group))


def record_inputs(
    layer: nn.Module, linears: Sequence[nn.Module], runs: Sequence[Callable[[], object]]
) -> list[LayerInputs]:
    """The inputs of `linears`, which are in `layer`, in runs of it."""
    recorder = InputRecorder()
    norms = [it for it in layer.modules() if getattr(getattr(it, "weight", None), "ndim", 0) == 1]
    hooks = [linear.register_forward_pre_hook(recorder.note_input) for linear in linears]
    hooks += [norm.register_forward_hook(recorder.note_output) for norm in norms]
    try:
        for run in runs:
            run()
            recorder.outputs.clear()
            recorder.seen.clear()
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.groups


# --- GPTQ: rounds input by input, and changes the weights that are left such that the outputs stay near


def round_by_gptq(
    weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, act_order: bool, damping: float
) -> Rounded:
    """Round weights float32 [outputs, inputs]. `hessian` float32 [inputs, inputs] is the mean of the inputs'
    outer products. With `act_order` the inputs with the largest values are rounded first. Scales are chosen
    before, so that groups lie in turn. Raises SettingError.
    """
    outputs, inputs = weight.shape
    unused = hessian.diagonal() == 0
    left = torch.where(unused, 0.0, weight)
    hessian = hessian + torch.diag(unused.float())
    nearest = grid.round(left)
    order = hessian.diagonal().argsort(descending=True) if act_order else torch.arange(inputs)
    order = order.to(weight.device)
    factor = inverse_factor(hessian[order][:, order], damping)
    left = left[:, order]
    quants = torch.zeros_like(left)
    groups = (order // grid.size).tolist()
    for begin in range(0, inputs, COLUMNS):
        end = min(begin + COLUMNS, inputs)
        errors = left.new_zeros(outputs, end - begin)
        with one_thread():
            for place in range(begin, end):
                scale, zero = nearest.scales[:, groups[place]], nearest.zeros[:, groups[place]]
                quants[:, place] = grid.quants(left[:, place], scale, zero)
                error = (left[:, place] - (quants[:, place] - zero) * scale) / factor[place, place]
                left[:, place + 1 : end].addr_(error, factor[place, place + 1 : end], alpha=-1)
                errors[:, place - begin] = error
        left[:, end:].addmm_(errors, factor[begin:end, end:], alpha=-1)
    return Rounded(quants[:, order.argsort()].to(torch.uint8), nearest.scales, nearest.zeros)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within it the CPU computes with one thread: for operations on one column, waiting for others takes
    longer than computing.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse, float32 [inputs, inputs]; damped more where a lack of
    calibration text needs it. Raises SettingError.
    """
    mean = hessian.diagonal().mean()
    while damping <= MAX_DAMPING:
        damped = hessian + torch.eye(len(hessian), device=hessian.device) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: torch.Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper
        damping *= 10
    raise SettingError(
        "--calibration", "the inputs of a layer are not finite, or too much alike, for this text"
    )


# --- AWQ: scales inputs with large values up, and what gives these inputs down


def scale_inputs(
    layer: nn.Module, inputs: Sequence[LayerInputs], grids: Sequence[Grid], run: Callable[[], torch.Tensor]
) -> None:
    """Scale the inputs of linear layers in place where that makes the rounding to their grids better. `run`
    computes the outputs of `layer` for some text, [1, tokens, hidden] of float32: a scaling that changes them
    is undone. A norm multiplies by its weight, or by 1 more than it.
    """
    for group, grid in zip(inputs, grids, strict=True):
        scales = best_scales(group, grid)
        giver: Any = group.giver or find_giver(layer, group.linears[0])
        if (scales == 1).all() or giver is None or len(giver.weight) != len(scales):
            continue
        expected = run()
        own = [it for module in (giver, *group.linears) for it in module.parameters(recurse=False)]
        before = [it.clone() for it in own]
        for offset in (0, 1) if giver.weight.dim() == 1 else (0,):
            divide(giver, scales, offset)
            for linear in group.linears:
                linear.weight.mul_(scales)
            if (run() - expected).norm() <= SAME * expected.norm():
                group.hessian /= scales[:, None] * scales
                break
            for it, numbers in zip(own, before, strict=True):
                it.copy_(numbers)


def best_scales(group: LayerInputs, grid: Grid) -> torch.Tensor:
    """The power of the inputs' size that gives the smallest error of the outputs, float32 [inputs]."""
    sizes = group.hessian.diagonal().sqrt()
    best, least = torch.ones_like(sizes), torch.inf
    for power in POWERS:
        scales = sizes.clamp(min=LEAST * float(sizes.max())) ** power
        scales = scales / (scales.max() * scales.min()).sqrt()
        hessian = group.hessian / (scales[:, None] * scales)
        weights = [linear.weight * scales for linear in group.linears]
        total = sum(output_error(own - grid.round(own, [1.0]).widen(), hessian) for own in weights)
        if total < least:
            best, least = scales, total
    return best


def divide(giver: Any, scales: torch.Tensor, offset: int) -> None:
    """Divide the outputs of a norm that multiplies by weight + offset, or of a linear layer, by scales
    float32 [outputs].
    """
    factors = scales if giver.weight.dim() == 1 else scales[:, None]
    giver.weight.copy_((giver.weight + offset) / factors - offset)
    if getattr(giver, "bias", None) is not None:
        giver.bias.div_(scales)


def find_giver(layer: nn.Module, linear: nn.Linear) -> nn.Module | None:
    """The linear layer beside `linear` in the model whose outputs are, times others, its inputs."""
    for parent in layer.modules():
        for name, child in parent.named_children():
            if child is linear:
                giver = getattr(parent, GIVERS.get(name, ""), None)
                return giver if type(giver) is nn.Linear else None
    return None
