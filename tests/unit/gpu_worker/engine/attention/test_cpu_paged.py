"""The native attention kernel against torch's attention in float32."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.engine.attention.backend import AttentionSpec, Geometry, KVCache, LayerSpec
from gpu_worker.engine.attention.cpu_paged import CpuPagedBackend
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.batch.inputs import build_inputs
from gpu_worker.engine.batch.row import Row, arrange
from gpu_worker.engine.cpu import native
from tests.support.engine.row_steps import BLOCKS, CPU, STEPS, chunk, rows

ERRORS = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.mark.parametrize(
    ("dtype", "block_size", "stored"),
    [
        (torch.float32, 5, None),
        (torch.float16, 8, None),
        *((torch.bfloat16, 16, stored) for stored in (None, *native.STORED_CODES)),
    ],
    ids=str,
)
def test_outputs_equal_those_of_torch(
    dtype: torch.dtype, block_size: int, stored: torch.dtype | None, library: Any
) -> None:
    """Features in all combinations; dimensions that fit the vectors and such that do not; caches of the same
    numbers and of `stored`, some of which are saturated. Slots that nobody wrote are NaN.
    """
    for (key_dim, value_dim), group, window, softcap, sinks in itertools.product(
        ((64, 64), (24, 18)), (1, 3), (None, 20), (None, 5.0), (None, torch.randn(6))
    ):
        torch.manual_seed(0)
        spec = AttentionSpec(2, group, window, key_dim**-0.5, softcap)
        geometries = [
            Geometry([LayerSpec(spec, key_dim, value_dim)], block_size, number, stored or number)
            for number in (torch.float32, dtype)
        ]
        caches = [KVCache(geometry, BLOCKS, CPU) for geometry in geometries]
        caches[1].fill(list(range(BLOCKS + 1)), math.nan)
        backends = [SdpaBackend(geometries[0], CPU), CpuPagedBackend(geometries[1], library)]
        scales = (
            {"key_scale": 0.7, "value_scale": 0.002} if stored else {"key_scale": 1.0, "value_scale": 1.0}
        )
        modules = [
            SimpleNamespace(keys=cache.keys[0], values=cache.values[0], spec=spec, **scales)
            for cache in caches
        ]
        modules = [type("Module", (), vars(module))() for module in modules]
        lines = rows(block_size, (70, 1, 33, 90))
        for step in STEPS:
            line = build_inputs(
                arrange([chunk(lines[row], begin, count) for row, begin, count in step]), block_size, CPU
            )
            tokens = line.ids.shape[1]
            query = torch.randn(1, tokens, 2 * group, key_dim).to(dtype).transpose(1, 2)
            key, value = (
                torch.randn(1, 2, tokens, key_dim).to(dtype),
                torch.randn(1, tokens, 2, value_dim).to(dtype).transpose(1, 2),
            )
            outputs = []
            for backend, module, number in zip(backends, modules, (torch.float32, dtype), strict=True):
                backend.prepare_forward(line)
                own = None if sinks is None else sinks[: 2 * group]
                outputs.append(
                    backend.attend(module, query.to(number), key.to(number), value.to(number), own)
                )
            torch.testing.assert_close(outputs[1].float(), outputs[0], rtol=0, atol=ERRORS[dtype])


@pytest.mark.parametrize("dtype", native.TYPE_CODES, ids=str)
@pytest.mark.parametrize("window", [None, 1100], ids=["all", "window"])
def test_bits_depend_neither_on_chunks_nor_on_how_work_is_split(
    dtype: torch.dtype, window: int | None, library: Any
) -> None:
    """A prompt at once; in chunks of odd sizes beside another row; and the last tokens one by one, each in
    several parts of its keys.
    """
    tokens, beside, sinks = 2500, 33, torch.randn(6)
    spec = AttentionSpec(2, 3, window, 0.1)
    geometry = Geometry([LayerSpec(spec, 64, 64)], 16, dtype, dtype)
    states = [torch.randn(1, heads, tokens + beside, 64).to(dtype) for heads in (6, 2, 2)]
    blocks = np.split(np.arange(1, BLOCKS * 2, dtype=np.int32), [-(-tokens // 16)])
    row, other = (
        Row(number, np.zeros(length, np.int32), 0, 9, blocks[number])
        for number, length in enumerate((tokens, beside))
    )

    def attend(cuts: list[int], others: int) -> torch.Tensor:
        """→ [1, tokens, 6, 64]. `others`: tokens of another row, computed beside each chunk."""
        cache, backend = KVCache(geometry, BLOCKS * 2, CPU), CpuPagedBackend(geometry, library)
        parts = {"keys": cache.keys[0], "values": cache.values[0], "spec": spec}
        module = type("Module", (), parts | {"key_scale": 1.0, "value_scale": 1.0})()
        outputs = []
        for begin, end in itertools.pairwise([0, *cuts, tokens]):
            slices = [chunk(row, begin, end - begin)] + [chunk(other, 0, others)] * (others > 0)
            backend.prepare_forward(build_inputs(slices, 16, CPU))
            places = [*range(begin, end), *range(tokens, tokens + others)]
            query, key, value = (state[:, :, places] for state in states)
            outputs.append(backend.attend(module, query, key, value, sinks))
        return torch.cat([output[:, : output.shape[1] - others] for output in outputs], 1)

    whole = attend([], 0)
    assert whole.isfinite().all()
    assert torch.equal(attend([700, 701, 2001], beside), whole)
    assert torch.equal(attend([1500, tokens - 2, tokens - 1], 0), whole)
