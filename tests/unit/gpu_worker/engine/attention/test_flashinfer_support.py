"""What FlashInfer's kernels support, and what they need plans for."""

import os
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from gpu_worker.engine.attention import choose
from gpu_worker.engine.attention.flashinfer_support import (
    add_ninja_to_path,
    latent_kernel,
    planned_heads,
    plans_needed_because,
    unsupported_because,
    workspace_bytes,
)
from gpu_worker.engine.attention.kv_cache import AttentionSpec, Geometry, LayerSpec
from gpu_worker.engine.attention.sdpa import SdpaBackend
from tests.support.engine.attention_steps import CPU
from tests.support.engine.fake_flashinfer.install import install

if not install():
    pytest.skip("where there is a GPU, the tests marked gpu try the real parts", allow_module_level=True)
from gpu_worker.engine.attention.flashinfer import FlashInferBackend

HOPPER = 9


@pytest.mark.parametrize(
    ("dims", "dtype", "why"),
    [
        ((128, 128), torch.bfloat16, ""),
        ((256, 256), torch.float16, ""),
        ((128, 128), torch.float32, "not for torch.float32"),
        ((192, 128), torch.bfloat16, "these have 128, 192"),
        ((80, 80), torch.float16, ""),
        ((96, 96), torch.bfloat16, ""),
        ((160, 160), torch.bfloat16, "these have 160"),
    ],
)
def test_unsupported_models_use_torch(
    dims: tuple[int, int],
    dtype: torch.dtype,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    geometry = Geometry([LayerSpec(AttentionSpec(2, 1, None, 1.0), *dims)], 64, dtype, dtype)
    found = unsupported_because(geometry)
    assert why in found and bool(found) == bool(why)
    monkeypatch.setattr(choose, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (HOPPER, 0))
    assert (
        isinstance(choose.choose_cuda_backend(geometry, CPU, 8, 4), SdpaBackend if why else FlashInferBackend)
        and found in caplog.text
    )


@pytest.mark.parametrize(
    ("dims", "kv_dtype", "why"),
    [
        ((64, 512), torch.bfloat16, ""),
        ((64, 512), torch.float8_e4m3fn, "8-bit floats (KV_CACHE_DTYPE)"),
        ((32, 256), torch.bfloat16, "latents of 64, 512 numbers, these have 32, 256"),
    ],
)
def test_latents_of_other_sizes_use_torch(dims: tuple[int, int], kv_dtype: torch.dtype, why: str) -> None:
    """For those of DeepSeek's size a plan is needed on every card, and no more room than FlashInfer asks."""
    layer = LayerSpec(AttentionSpec(1, 128, None, 1.0, latent=True), *dims)
    geometry = Geometry([layer], 64, torch.bfloat16, kv_dtype)
    found = unsupported_because(geometry)
    assert why in found and bool(found) == bool(why)
    assert "latents" in plans_needed_because(geometry, layer.spec, HOPPER)
    assert workspace_bytes(geometry, 132, 256) == 2**27


@pytest.mark.parametrize(("heads", "planned"), [(1, 1), (16, 16), (20, 32), (96, 128), (128, 128)])
def test_tiles_of_latents_end_between_tokens(heads: int, planned: int) -> None:
    """Of 64 and 128 pairs of token and head; where no row has two tokens, heads stay as they are."""
    assert planned_heads(heads, longest=2) == planned
    assert planned_heads(heads, longest=1) == heads


def test_kernels_for_latents_are_named() -> None:
    assert [latent_kernel(generation) for generation in (8, HOPPER, 10, 12)] == ["fa2", "fa3", "fa2", "fa2"]


def test_more_heads_than_a_tile_of_latents_use_torch() -> None:
    layer = LayerSpec(AttentionSpec(1, 256, None, 1.0, latent=True), 64, 512)
    geometry = Geometry([layer], 64, torch.bfloat16, torch.bfloat16)
    assert "at most 128 heads, these have 256" in unsupported_because(geometry)


@pytest.mark.parametrize(("window", "softcap"), [(4096, None), (None, 30.0)])
def test_latents_under_windows_and_soft_caps_use_torch(window: int | None, softcap: float | None) -> None:
    """FlashInfer's kernel for latents would leave them out."""
    spec = AttentionSpec(1, 128, window, 1.0, softcap, latent=True)
    geometry = Geometry([LayerSpec(spec, 64, 512)], 64, torch.bfloat16, torch.bfloat16)
    assert "no sliding windows and no soft caps" in unsupported_because(geometry)


@pytest.mark.parametrize(
    ("group", "softcap", "block_size", "generation", "why"),
    [
        (32, None, 64, HOPPER, ""),
        (71, None, 64, HOPPER, "71 query heads"),
        (1, 30.0, 64, HOPPER, "soft-capped"),
        (1, None, 48, HOPPER, "48 tokens (BLOCK_SIZE)"),
        (1, None, 64, 8, "capability is 8"),
    ],
)
def test_plans_are_needed_where_a_kernel_lacks_a_feature(
    group: int,
    softcap: float | None,
    block_size: int,
    generation: int,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer = LayerSpec(AttentionSpec(2, group, None, 1.0, softcap), 64, 64)
    geometry = Geometry([layer], block_size, torch.bfloat16, torch.bfloat16)
    found = plans_needed_because(geometry, layer.spec, generation)
    assert why in found and bool(found) == bool(why)
    backend = FlashInferBackend(geometry, CPU, generation, 8, 4)
    assert backend.plan_free == (not why) and found in caplog.text


@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "mib"),
    [(8, 4, 128, 128), (1, 71, 64, 128), (64, 1, 128, 136)],
    ids=["Llama-8B", "Falcon-7B", "Llama-65B"],
)
def test_plans_have_room_to_split_rows(kv_heads: int, group: int, dim: int, mib: int) -> None:
    """On an A100, for graphs of 256 rows, as FlashInfer's scheduler lays them out."""
    layer = LayerSpec(AttentionSpec(kv_heads, group, None, 1.0), dim, dim)
    geometry = Geometry([layer], 64, torch.bfloat16, torch.bfloat16)
    assert workspace_bytes(geometry, 108, 256) // 2**20 == mib


def test_ninja_is_found_where_no_environment_was_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    program = tmp_path / "scripts/ninja"
    program.parent.mkdir()
    program.touch(0o755)
    for _ in range(2):
        add_ninja_to_path()
        assert shutil.which("ninja") == str(program)
    assert os.environ["PATH"] == f"{tmp_path}/bin:{tmp_path}/scripts", "once"
