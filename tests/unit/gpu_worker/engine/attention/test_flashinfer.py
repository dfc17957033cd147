"""FlashInfer's attention, computed by torch on CPU, against torch's own; what its kernels support, what they
need plans for, and when the rows of a step are split.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.engine.attention import backend as attention
from gpu_worker.engine.attention import choose
from gpu_worker.engine.attention.backend import Geometry, KVCache, LayerSpec
from gpu_worker.engine.attention.flashinfer_support import (
    plans_needed_because,
    unsupported_because,
    workspace_bytes,
)
from gpu_worker.engine.attention.sdpa import SdpaBackend
from tests.support.engine import fake_flashinfer
from tests.support.engine.attention_pair import Pair, decoding, parts_of
from tests.support.engine.row_steps import BLOCKS, CPU
from tests.support.parameters.slow_but import slow_but

if not fake_flashinfer.install():
    pytest.skip("where there is a GPU, the tests marked gpu try the real parts", allow_module_level=True)
from gpu_worker.engine.attention import flashinfer
from gpu_worker.engine.attention.flashinfer import FlashInferBackend

HOPPER = 9
ERROR = 2e-5


@pytest.mark.parametrize(
    ("block_size", "generation", "kv_dtype", "dim"),
    [
        (16, HOPPER, torch.float32, 64),
        (5, HOPPER, torch.float32, 64),
        (16, HOPPER, torch.float8_e5m2, 64),
        (16, 8, torch.float32, 96),
        (16, HOPPER, torch.float8_e4m3fn, 96),
    ],
    ids=str,
)
def test_outputs_equal_those_of_torch(
    block_size: int, generation: int, kv_dtype: torch.dtype, dim: int
) -> None:
    """Against torch's, in all combinations; slots that nobody wrote are NaN. Heads of 80 and 96 are
    padded.
    """
    for window, softcap, sinks in itertools.product((None, 20), (None, 5.0), (None, torch.randn(6))):
        group = 3 if window else 1
        torch.manual_seed(0)
        layer = LayerSpec(2, group, window, 0.2, dim, dim, softcap)
        layer = layer if kv_dtype == torch.float32 else replace(layer, key_scale=0.7, value_scale=0.01)
        geometry = Geometry([layer], block_size, torch.float32, kv_dtype)
        flash = FlashInferBackend(geometry, CPU, generation, 8, BLOCKS)
        plan_free = (block_size, generation, softcap) == (16, HOPPER, None) and kv_dtype != torch.float8_e5m2
        assert flash.plan_free == plan_free
        pair = Pair(geometry, flash, ERROR, exact_kv=kv_dtype)
        keys, values = pair.caches[1].keys[0], pair.caches[1].values[0]
        assert keys.shape[3] == values.shape[3] == (64 if dim == 64 else 128)
        pair.caches[1].fill(list(range(BLOCKS + 1)), math.nan)
        pair.check_steps(None if sinks is None else sinks[: 2 * group])


def test_split_rows_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """XQA is told of more processors, so that it splits each row into 8, but not those of a window."""
    torch.manual_seed(0)
    told = list[int]()

    def note(*given: Any, sm_count: int, **rest: Any) -> None:
        told.append(sm_count)
        fake_flashinfer.xqa(*given, sm_count=sm_count, **rest)

    monkeypatch.setattr("gpu_worker.engine.attention.flashinfer.xqa", note)
    specs = [LayerSpec(2, 3, window, 0.2, 64, 64) for window in (None, 20)]
    geometry = Geometry(specs, 16, torch.float32, torch.float32)
    flash, modules = FlashInferBackend(geometry, CPU, HOPPER, 8, BLOCKS), [SimpleNamespace() for _ in specs]
    attention.attach(modules, geometry, KVCache(geometry, BLOCKS, CPU), flash)
    positions = torch.tensor([40, 0, 0], dtype=torch.int32)
    table = torch.tensor([[1, 2, 3], [4, 0, 0], [5, 0, 0]], dtype=torch.int32)
    for module in modules:
        query, key, value = (torch.randn(1, num, 3, 64) for num in (6, 2, 2))
        outputs = []
        for is_split in (False, True):
            flash.prepare_decode(positions, table, is_split)
            outputs.append(flash.attend(module, query, key, value, None))
        assert torch.equal(*outputs)
    assert told == [3 * 2, 8 * 3 * 2, 3 * 2, 3 * 2]


@pytest.mark.parametrize("generation", slow_but([HOPPER], [8, HOPPER]))
def test_layers_have_heads_of_their_own_size(generation: int) -> None:
    """Of 96, padded to 128, beside 64: in a step with prompts, and in a captured one."""
    torch.manual_seed(0)
    layers = [LayerSpec(2, 3, None, 0.2, dim, dim) for dim in (64, 96)]
    geometry = Geometry(layers, 16, torch.float32, torch.float32)
    flash = FlashInferBackend(geometry, CPU, generation, 8, BLOCKS)
    assert [view.key_dim for view in flash.views] == [64, 128]
    pair = Pair(geometry, flash, ERROR)
    lines = pair.check_steps()
    slices = parts_of(lines, [(0, 71, 1), (1, 3, 1), (3, 91, 1)])
    positions, table = decoding(slices)
    for layer in range(2):
        query, key, value = given = pair.tokens(3, layer)
        exact, _ = pair.attend(slices, given, None, layer)
        flash.plan_decode(positions.numpy(), table.numpy())
        flash.prepare_decode(positions, table)
        pair.check([exact, flash.attend(pair.modules[1][layer], query, key, value, None)], "captured")


@pytest.mark.parametrize(("block_size", "heads"), [(16, 3), (5, 19)])
def test_outputs_over_latents_equal_those_of_torch(block_size: int, heads: int) -> None:
    """Prompts in chunks beside rows that decode; slots that nobody wrote are NaN. Of 19 heads FlashInfer
    would refuse a step as it is.
    """
    torch.manual_seed(0)
    rotary_dim, rank = 8, 24
    layer = LayerSpec(1, heads, None, 0.2, rotary_dim, rank, latent=True)
    geometry = Geometry([layer], block_size, torch.float32, torch.float32)
    flash = FlashInferBackend(geometry, CPU, HOPPER, 8, BLOCKS)
    assert flash.planned == [True] and flash.geometry == geometry
    pair = Pair(geometry, flash, ERROR)
    pair.caches[1].fill(list(range(BLOCKS + 1)), math.nan)
    pair.check_steps()


def test_all_ranks_split_the_rows_of_the_same_steps() -> None:
    """Though one has more K heads than the other, and would decide otherwise."""
    ranks = []
    for kv_heads in (1, 4):
        geometry = Geometry([LayerSpec(kv_heads, 3, None, 0.2, 64, 64)], 16, torch.float32, torch.float32)
        ranks.append(FlashInferBackend(geometry, CPU, HOPPER, 8, BLOCKS))
        ranks[-1].processors = ranks[-1].split_processors = 132
    steps = [np.array([2**13] + [256] * rows, np.int32) for rows in range(1, 200)]
    assert any(ranks[0].splits_rows(step) != ranks[1].splits_rows(step) for step in steps)
    shapes = [(rank.split_heads, rank.processors) for rank in ranks]
    for rank in ranks:
        rank.agree(lambda own: shapes)
    assert all(ranks[0].splits_rows(step) == ranks[1].splits_rows(step) for step in steps)
    assert any(ranks[0].splits_rows(step) for step in steps)


PLAIN = LayerSpec(2, 1, None, 1.0, 128, 128)
LATENT = LayerSpec(1, 128, None, 1.0, 64, 512, latent=True)
HALF, FLOATS8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("spec", "dims", "dtypes", "why"),
    [
        (PLAIN, (128, 128), (HALF, HALF), ""),
        (PLAIN, (256, 256), (torch.float16, torch.float16), ""),
        (PLAIN, (128, 128), (torch.float32, torch.float32), "not for torch.float32"),
        (PLAIN, (192, 128), (HALF, HALF), "these have 128, 192"),
        (PLAIN, (80, 80), (HALF, HALF), ""),
        (PLAIN, (160, 160), (HALF, HALF), "these have 160"),
        (LATENT, (64, 512), (HALF, HALF), ""),
        (LATENT, (64, 512), (HALF, FLOATS8), "8-bit floats (KV_CACHE_DTYPE)"),
        (LATENT, (32, 256), (HALF, HALF), "latents of 64, 512 numbers, these have 32, 256"),
        (replace(LATENT, window=4096), (64, 512), (HALF, HALF), "no sliding windows and no soft caps"),
        (replace(LATENT, softcap=30.0), (64, 512), (HALF, HALF), "no sliding windows and no soft caps"),
    ],
)
def test_unsupported_models_use_torch(
    spec: LayerSpec,
    dims: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For latents a plan is needed on every card, and no more room than FlashInfer asks for."""
    spec = replace(spec, key_dim=dims[0], value_dim=dims[1])
    geometry = Geometry([spec], 64, *dtypes)
    found = unsupported_because(geometry)
    assert why in found and bool(found) == bool(why)
    if spec.latent:
        assert "latents" in plans_needed_because(geometry, spec, HOPPER)
        assert workspace_bytes(geometry, 132, 256) == 2**27
    monkeypatch.setattr(choose, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (HOPPER, 0))
    monkeypatch.setattr(
        flashinfer, "FlashInferBackend", lambda *given: FlashInferBackend(geometry, CPU, HOPPER, 8, 4)
    )
    backend = choose.choose_backend(geometry, torch.device("cuda"), 8, 4)
    assert isinstance(backend, SdpaBackend if why else FlashInferBackend) and found in caplog.text
