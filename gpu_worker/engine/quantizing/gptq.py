"""GPTQ (arXiv:2210.17323): rounds the weights of a layer input by input, and changes those that are left such
that the layer's outputs stay near.
"""

import contextlib
from collections.abc import Iterator

import torch

from common.settings.settings import SettingError
from gpu_worker.engine.quantizing.grid import Grid, Rounded

COLUMNS = 128
"""Inputs after which the others are changed, all at once."""
MAX_DAMPING = 1.0


def solve(
    weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, size: int, act_order: bool, damping: float
) -> Rounded:
    """Round weights float32 [outputs, inputs] in groups of `size` inputs. `hessian` float32 [inputs, inputs]
    is the mean of the inputs' outer products. With `act_order` the inputs with the largest values are rounded
    first; scales are chosen before, so that groups lie in turn. Raises SettingError.
    """
    outputs, inputs = weight.shape
    unused = hessian.diagonal() == 0
    left = torch.where(unused, 0.0, weight)
    hessian = hessian + torch.diag(unused.float())
    start = grid.round_groups(left, size)
    scales, zeros = start.scales.clone(), start.zeros.clone()
    order = hessian.diagonal().argsort(descending=True) if act_order else torch.arange(inputs)
    order = order.to(weight.device)
    factor = inverse_factor(hessian[order][:, order], damping)
    left = left[:, order]
    quants = torch.zeros_like(left)
    groups = (order // size).tolist()
    for begin in range(0, inputs, COLUMNS):
        end = min(begin + COLUMNS, inputs)
        errors = left.new_zeros(outputs, end - begin)
        with one_thread():
            for place in range(begin, end):
                group = groups[place]
                if not act_order and place % size == 0:
                    chosen = grid.fit(left[:, place : place + size])
                    scales[:, group], zeros[:, group] = (table[:, 0] for table in chosen)
                scale, zero = scales[:, group], zeros[:, group]
                quants[:, place] = grid.round(left[:, place], scale, zero)
                rounded = (quants[:, place] - zero) * scale
                error = (left[:, place] - rounded) / factor[place, place]
                left[:, place + 1 : end].addr_(error, factor[place, place + 1 : end], alpha=-1)
                errors[:, place - begin] = error
        left[:, end:].addmm_(errors, factor[begin:end, end:], alpha=-1)
    return Rounded(quants[:, order.argsort()].to(torch.uint8), scales, zeros)


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


def output_error(error: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """The mean squared error of a layer's outputs, summed over these, where its weights are wrong by `error`
    [outputs, inputs]; all float32.
    """
    total: torch.Tensor = ((error @ hessian) * error).sum()
    return total
