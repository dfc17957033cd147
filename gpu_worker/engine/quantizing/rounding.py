"""Rounding: the weights of linear layers become integers with a scale for each group of inputs, by GPTQ
(arXiv:2210.17323).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common.settings.settings import SettingError

SHRINKS = [1 - step / 20 for step in range(11)]
"""Parts of a group's range that are tried: a narrower one clips the largest weights, and has finer steps."""
COLUMNS = 128
"""Inputs after which GPTQ changes the others, all at once."""
MAX_DAMPING = 1.0


@dataclass(frozen=True)
class Rounded:
    """The weights of a layer as integers: (quant - zero) * scale.

    Attributes:
        quants: uint8 [outputs, inputs].
        scales: float32 [outputs, groups], numbers that the checkpoint's dtype has.
        zero: the middle of the integers.
    """

    quants: torch.Tensor
    scales: torch.Tensor
    zero: int

    def widen(self) -> torch.Tensor:
        """float32 [outputs, inputs]"""
        size = self.quants.shape[1] // self.scales.shape[1]
        return (self.quants.float() - self.zero) * self.scales.repeat_interleave(size, 1)


@dataclass(frozen=True)
class Grid:
    """Integers from 0 to 2**bits - 1, the middle of which is the zero. Scales are numbers of `dtype`, and
    `size` inputs share one.
    """

    bits: int
    dtype: torch.dtype
    size: int

    @property
    def zero(self) -> int:
        return int(2 ** (self.bits - 1))

    def quants(self, weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Whole numbers, float32 as the weights [..., numbers]."""
        return (weights / scales + self.zero).round().clamp(0, 2 * self.zero - 1)

    def round(self, weight: torch.Tensor) -> Rounded:
        """Round weights float32 [outputs, inputs] to the nearest integers, with the scales of SHRINKS for
        which the squared errors of a group are the least.
        """
        groups = weight.reshape(len(weight), -1, self.size)
        whole = groups.abs().amax(-1, keepdim=True) / (self.zero - 0.5)
        scales, least = torch.ones_like(whole), torch.full_like(whole, torch.inf)
        for shrink in SHRINKS:
            tried = (whole * shrink).to(self.dtype).float()
            tried = torch.where(tried > 0, tried, 1.0)
            errors = ((self.quants(groups, tried) - self.zero) * tried - groups).pow(2).sum(-1, keepdim=True)
            better = errors < least
            scales, least = torch.where(better, tried, scales), torch.where(better, errors, least)
        return Rounded(self.quants(groups, scales).to(torch.uint8).flatten(1), scales[..., 0], self.zero)


def output_error(error: torch.Tensor, hessian: torch.Tensor) -> float:
    """The mean squared error of a layer's outputs, summed over these, where its weights are wrong by `error`
    [outputs, inputs]; all float32.
    """
    return float(((error @ hessian) * error).sum())


def record_hessians(
    linears: Sequence[nn.Linear], runs: Sequence[Callable[[], object]]
) -> dict[nn.Module, torch.Tensor]:
    """By linear layer the mean of its inputs' outer products in these runs, float32 [inputs, inputs]. Layers
    that get one tensor, one after the other, share it.
    """
    hessians: dict[nn.Module, torch.Tensor] = {}
    counts: dict[nn.Module, int] = {}
    last: list[Any] = [None, None]

    def note(linear: Any, arguments: Any) -> None:
        if arguments[0] is not last[0]:
            rows = arguments[0].flatten(0, -2).float()
            own = hessians.setdefault(linear, rows.new_zeros(rows.shape[1], rows.shape[1]))
            counts[linear] = counts.get(linear, 0) + len(rows)
            own.lerp_(rows.T @ rows / len(rows), len(rows) / counts[linear])
            last[:] = arguments[0], own
        hessians[linear] = last[1]

    hooks = [linear.register_forward_pre_hook(note) for linear in linears]
    try:
        for run in runs:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return hessians


def round_by_gptq(
    weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, act_order: bool, damping: float
) -> Rounded:
    """Round weights float32 [outputs, inputs] input by input, and change those that are left such that the
    outputs stay near. `hessian` float32 [inputs, inputs] is the mean of the inputs' outer products. With
    `act_order` the inputs with the largest values are rounded first. Scales are chosen before, so that groups
    lie in turn. Raises SettingError.
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
                scale = nearest.scales[:, groups[place]]
                quants[:, place] = grid.quants(left[:, place], scale)
                error = (left[:, place] - (quants[:, place] - grid.zero) * scale) / factor[place, place]
                left[:, place + 1 : end].addr_(error, factor[place, place + 1 : end], alpha=-1)
                errors[:, place - begin] = error
        left[:, end:].addmm_(errors, factor[begin:end, end:], alpha=-1)
    return Rounded(quants[:, order.argsort()].to(torch.uint8), nearest.scales, grid.zero)


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
