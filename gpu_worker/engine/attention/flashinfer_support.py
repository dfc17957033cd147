"""What FlashInfer has kernels for."""

import os
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import replace

import torch

from gpu_worker.engine.attention.backend import Geometry, LayerSpec
from gpu_worker.protocol import first_cause

DTYPES = (torch.bfloat16, torch.float16)
DIMS = (64, 128, 256)
PADDED_DIMS = (64, 128)
"""Sizes to which smaller heads are padded. Larger heads are not padded to 256: caches could be twice as
large.
"""
LATENT_DIMS = (64, 512)
"""Of the rotary part and the latent: DeepSeek's, Kimi's, GLM's, LongCat's."""
MAX_LATENT_HEADS = 128
HOPPER = 9
PLAN_FREE_BLOCKS = (16, 32, 64, 128)
PLAN_FREE_GENERATIONS = (9, 10, 12)
"""Major compute capabilities that XQA is compiled for."""
PLAN_FREE_GROUP = 32
"""Most query heads that share one K head: more, of 256 numbers each, do not fit into one program's memory."""
WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer asks for at least."""
SMALL_TILE, MEDIUM_TILE, LARGE_TILE = 16, 64, 128
ALIGNMENT = 64


def unsupported_because(geometry: Geometry) -> str:
    """Why FlashInfer has no attention for a model, also with padded heads; empty where it has."""
    if geometry.dtype not in DTYPES:
        return f"it has kernels for {listed(DTYPES)}, not for {geometry.dtype}"
    if any(layer.alibi_slopes for layer in geometry.layers):
        return "its kernels here have no ALiBi position biases"
    return next(filter(None, (view_unsupported_because(geometry, view) for view in geometry.views)), "")


def view_unsupported_because(geometry: Geometry, view: LayerSpec) -> str:
    if view.latent:
        return latents_unsupported_because(geometry, view)
    dims = sorted({view.key_dim, view.value_dim})
    served = len(dims) == 1 and padded_dim(dims[0]) in DIMS
    return "" if served else f"it has kernels for heads of {listed(DIMS)} numbers, these have {listed(dims)}"


def latents_unsupported_because(geometry: Geometry, view: LayerSpec) -> str:
    dims, kernels = (view.key_dim, view.value_dim), "its kernels for latents have"
    served = f"rotary parts and latents of {listed(LATENT_DIMS)} numbers"
    return first_cause(
        (geometry.kv_dtype != geometry.dtype, "it is not used for latents of 8-bit floats (KV_CACHE_DTYPE)"),
        (
            view.group > MAX_LATENT_HEADS,
            f"{kernels} at most {MAX_LATENT_HEADS} heads, these have {view.group}",
        ),
        (
            (view.window, view.softcap) != (None, None),
            f"{kernels} no sliding windows and no soft caps",
        ),
        (dims != LATENT_DIMS, f"it has kernels for {served}, these have {listed(dims)}"),
    )


def with_padded_heads(geometry: Geometry) -> Geometry:
    """What the cache keeps of a token for FlashInfer: heads of a size that it has kernels for, and latents as
    they are.
    """
    layers = [
        layer
        if layer.latent
        else replace(layer, key_dim=padded_dim(layer.key_dim), value_dim=padded_dim(layer.value_dim))
        for layer in geometry.layers
    ]
    return replace(geometry, layers=layers)


def padded_dim(dim: int) -> int:
    return next(size for size in (*PADDED_DIMS, dim) if dim <= size)


def plans_needed_because(geometry: Geometry, view: LayerSpec, generation: int) -> str:
    """Why rows that decode need plans of the host in these layers; empty where XQA serves them."""
    return first_cause(
        (view.latent, "layers keep latents, which XQA does not read"),
        (view.softcap is not None, "scores are soft-capped"),
        (
            view.group > PLAN_FREE_GROUP,
            f"{view.group} query heads share a K head, more than {PLAN_FREE_GROUP}",
        ),
        (
            geometry.block_size not in PLAN_FREE_BLOCKS,
            f"blocks have {geometry.block_size} tokens (BLOCK_SIZE), not {listed(PLAN_FREE_BLOCKS)}",
        ),
        (
            geometry.kv_dtype == torch.float8_e5m2,
            "XQA reads 8-bit floats of e4m3, not of e5m2 (KV_CACHE_DTYPE)",
        ),
        (
            generation not in PLAN_FREE_GENERATIONS,
            f"the GPU's compute capability is {generation}, not {listed(PLAN_FREE_GENERATIONS)}",
        ),
    )


def latent_kernel(generation: int) -> str:
    """FlashInfer's kernel for latents, by its name."""
    return "fa3" if generation == HOPPER else "fa2"


def planned_heads(heads: int, longest: int) -> int:
    """How many query heads a step over latents is planned for; `longest`: tokens of its longest row. The
    kernel takes 64 or 128 pairs of token and head at a time. Where such a tile ends between the heads of one
    token, it leaves out the last key of that token if a tile of keys begins there, and FlashInfer refuses the
    plan: a power of two divides all tiles.
    """
    return heads if longest == 1 else 1 << (heads - 1).bit_length()


def workspace_bytes(geometry: Geometry, processors: int, max_rows: int) -> int:
    """Room for what programs that share a row exchange: of each query its outputs and the sum of its softmax,
    in float32. FlashInfer plans two programs for each multiprocessor, or those of all rows; over latents only
    the former, for which WORKSPACE_BYTES are enough.
    """
    sizes = [WORKSPACE_BYTES]
    for layer in (layer for layer in geometry.layers if not layer.latent):
        group, dim = layer.group, layer.value_dim
        programs, tile = 2 * processors // layer.kv_heads, tile_of(group, dim)
        tiles = -(-max_rows * group // tile) + max_rows - 1
        pairs = max(programs * tile_of(LARGE_TILE + 1, dim), max(programs, tiles) * tile)
        queries = -(-pairs // group)
        sizes.append(layer.kv_heads * group * queries * (dim + 1) * 4 + 2 * ALIGNMENT)
    return max(sizes)


def tile_of(queries: int, dim: int) -> int:
    """How many queries a program computes; `queries`: how many share a K head and its keys."""
    if queries <= SMALL_TILE:
        return SMALL_TILE
    return MEDIUM_TILE if queries <= MEDIUM_TILE or dim >= 256 else LARGE_TILE


def add_ninja_to_path() -> None:
    """Make ninja, by which FlashInfer compiles, available by its name: its folder, that of this interpreter,
    is in PATH only if the virtual environment was activated.
    """
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join(
            (os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts"))
        )


def listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
