"""FlashInfer's attention, and the kernel that writes K and V, against torch."""

import itertools
import math
from typing import Any

import pytest
import torch

from gpu_worker.engine.attention.backend import Geometry, LayerSpec
from gpu_worker.engine.attention.sdpa import SdpaBackend
from tests.support.engine.attention_pair import LENGTHS, Pair, decoding, parts_of
from tests.support.engine.on_cuda import ANYWHERE, backend_of, needs_flash
from tests.support.engine.row_steps import BLOCKS, rows

ERRORS = {torch.float16: 5e-3, torch.bfloat16: 4e-2}
KV_HEADS = 2
MAX_ROWS = 8

Shape = tuple[torch.dtype, int, int, int]
SERVED: list[Shape] = [(torch.bfloat16, 64, 128, 4), (torch.bfloat16, 64, 64, 3)]
"""(dtype, block size, dimension, group) of the shapes that are timed. FlashInfer compiles each for itself,
with and without a window.
"""
OTHERS: list[Shape] = [
    (torch.float16, 16, 128, 8),
    (torch.bfloat16, 16, 256, 1),
    (torch.bfloat16, 64, 80, 4),
    (torch.float16, 64, 64, 8),
]
SHAPES: list[Any] = [*SERVED, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)]
FEATURES = list(itertools.product((None, 20), (None, 5.0), (False, True)))
"""(window, softcap, sinks)"""


def pair_of(device: str, shape: Shape, window: int | None, softcap: float | None) -> Pair:
    needs_flash(device)
    dtype, block_size, dim, group = shape
    layer = LayerSpec(KV_HEADS, group, window, dim**-0.5, dim, dim, softcap)
    return flash_pair(Geometry([layer], block_size, dtype, dtype), torch.device(device))


def flash_pair(geometry: Geometry, device: torch.device) -> Pair:
    flash = backend_of(geometry, device, MAX_ROWS, BLOCKS)
    assert not isinstance(flash, SdpaBackend)
    error = ERRORS[geometry.dtype]
    return Pair(geometry, flash, error, error / 2, device)


@ANYWHERE
@pytest.mark.parametrize(("window", "softcap", "sinks"), FEATURES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_equal_those_of_torch(
    device: str, shape: Shape, window: int | None, softcap: float | None, sinks: bool
) -> None:
    """Prompts, rows that decode beside them, rows that decode. Blocks that nobody owns are NaN, others begin
    as zeros, as in the engine.
    """
    torch.manual_seed(0)
    _, block_size, _, group = shape
    pair, lines = pair_of(device, shape, window, softcap), rows(block_size, LENGTHS)
    owned = {int(block) for line in lines for block in line.blocks}
    pair.caches[1].fill([block for block in range(BLOCKS + 1) if block not in owned], math.nan)
    pair.check_steps(torch.randn(KV_HEADS * group) if sinks else None)


@ANYWHERE
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("shape", SERVED, ids=str)
def test_steps_with_inputs_on_the_device_equal_those_from_the_host(
    device: str, shape: Shape, window: int | None
) -> None:
    """The same bits after either of `prepare_decode` and `prepare_forward`, also beside rows that only fill a
    graph.
    """
    torch.manual_seed(0)
    pair = pair_of(device, shape, window, None)
    assert pair.other.plan_free
    lines = pair.check_steps()
    slices = parts_of(lines, [(0, 71, 1), (1, 3, 1), (3, 91, 1)])
    given = pair.tokens(len(slices))
    _, planned = pair.attend(slices, given, None)
    pair.other.prepare_decode(*decoding(slices, 2, pair.device))
    filled = [torch.cat((tensor, tensor[:, :, :2]), 2).to(pair.device) for tensor in given]
    found = pair.other.attend(pair.modules[1][0], *filled, None)
    assert torch.equal(found[:, : len(slices)], planned)


@ANYWHERE
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("shape", SERVED, ids=str)
def test_split_rows_equal_those_of_torch(device: str, shape: Shape, sinks: bool) -> None:
    """A long row beside short ones, all in 8 parts: of the short ones most are empty."""
    torch.manual_seed(0)
    pair, lines = pair_of(device, shape, None, None), rows(shape[1], (2100, 1, 33))
    own = torch.randn(KV_HEADS * shape[3]) if sinks else None
    prompts = parts_of(lines, [(0, 0, 2100), (1, 0, 1), (2, 0, 33)])
    pair.attend(prompts, pair.tokens(2134), own)
    slices, given = parts_of(lines, [(0, 2100, 1), (1, 1, 1), (2, 33, 1)]), pair.tokens(3)
    exact, _ = pair.attend(slices, given, own)
    pair.other.prepare_decode(*decoding(slices, 0, pair.device), True)
    tensors = [None if one is None else one.to(pair.device) for one in (*given, own)]
    for _ in range(2):  # the counters are left as they were
        pair.check([exact, pair.other.attend(pair.modules[1][0], *tensors)], "split")
