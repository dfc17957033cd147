"""The kernels of LoRA adapters, computed by torch: where Triton is not installed."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from gpu_worker.engine.adapters import layers

KERNELS = "gpu_worker.engine.cuda.kernels.adapters"


def install(patch: pytest.MonkeyPatch) -> None:
    """Make layers on CPU take their adapters from buffers, as on CUDA."""
    module = ModuleType(KERNELS)
    vars(module).update(shrink=shrink, expand=expand)
    patch.setitem(sys.modules, KERNELS, module)
    patch.setattr(layers, "multiplies_adapters", lambda device: True)


def groups(
    ranks: torch.Tensor, order: torch.Tensor, starts: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield slot, rank and places of each slot that has tokens: ranks int32 [slots], order int32 [tokens],
    starts int32 [slots + 1].
    """
    for slot, rank in enumerate(ranks.tolist()):
        if len(places := order[int(starts[slot]) : int(starts[slot + 1])].long()):
            yield slot, rank, places


def shrink(
    rows: torch.Tensor, down: torch.Tensor, ranks: torch.Tensor, order: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """As the kernel's; NaN where that writes nothing."""
    shrunk = torch.full((len(rows), down.shape[1]), torch.nan)
    for slot, rank, places in groups(ranks, order, starts):
        shrunk[places, :rank] = rows[places].float() @ down[slot, :rank].float().T
    return shrunk


def expand(
    output: torch.Tensor,
    shrunk: torch.Tensor,
    up: torch.Tensor,
    ranks: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    """As the kernel's."""
    for slot, rank, places in groups(ranks, order, starts):
        added = shrunk[places, :rank].to(up.dtype).float() @ up[slot, :, :rank].float().T
        output[places] = (output[places].float() + added).to(output.dtype)
