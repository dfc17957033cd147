"""Caches: 8-bit floats give the ids of a plain implementation that rounds K and V alike; latents (MLA);
scales.

The native attention kernel against torch's attention in float32.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache

from gpu_worker.engine.attention.backend import FLOATS8, Geometry, KVCache, LayerSpec, raw
from gpu_worker.engine.attention.cpu_paged import CpuPagedBackend
from gpu_worker.engine.batch.inputs import build_inputs
from gpu_worker.engine.batch.row import Row, StepSlices
from gpu_worker.engine.cpu import native
from gpu_worker.engine.model.warmup import scale_layers
from tests.support.engine import tiny_models
from tests.support.engine.attention_pair import Pair
from tests.support.engine.row_steps import BLOCKS, CPU, chunk
from tests.support.engine.tiny_engine import NEW_TOKENS, check_ids, engine_of, play, prompts
from tests.support.engine.tiny_models import FAMILIES

Scales = Mapping[int, tuple[float, float]]
"""By layer: of K and of V."""


class QuantizedCache(DynamicCache):
    """K and V as the nearest 8-bit floats, divided by their layer's scales (default: 1)."""

    def __init__(self, config: Any, dtype: torch.dtype, scales: Scales) -> None:
        super().__init__(config=config)
        self.dtype = dtype
        self.scales = scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, kv_heads, tokens, dim] float32 → what the cache has of all tokens"""
        scales = self.scales.get(layer_idx, (1.0, 1.0))
        rounded = (self.rounded(key_states, scales[0]), self.rounded(value_states, scales[1]))
        return super().update(*rounded, layer_idx, *rest, **options)

    def rounded(self, numbers: torch.Tensor, scale: float) -> torch.Tensor:
        largest = torch.finfo(self.dtype).max
        return (numbers / scale).clamp(-largest, largest).to(self.dtype).float() * scale


SCALES = {0: (0.03, 0.002), 2: (1.5, 4.0)}
"""Of some layers: K and V that are saturated, and such as lie among the smallest numbers."""


def save_scaled(folder: Path, family: str, scales: Scales) -> Any:
    """Write a tiny model with scales as compressed-tensors writes them → transformers' own."""
    model, file = tiny_models.save(folder, *FAMILIES[family]), folder / "model.safetensors"
    tensors = load_file(file)
    for number, (key, value) in scales.items():
        attention = f"model.layers.{number}.self_attn"
        tensors |= {f"{attention}.k_scale": torch.tensor(key), f"{attention}.v_scale": torch.tensor([value])}
    save_file(tensors, file, {"format": "pt"})
    return model


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype", "written", "meant"),
    [
        *(("Llama", name, SCALES, SCALES) for name in FLOATS8),
        ("DeepSeek-V3", "fp8_e4m3", {1: (0.5, 7.0)}, {1: (0.5, 0.5)}),
    ],
)
def test_ids_are_those_of_a_plain_implementation(
    family: str, kv_cache_dtype: str, written: Scales, meant: Scales, tmp_path: Path
) -> None:
    """With blocks of another size, too. Latents and their rotary part have the scale of K, as vLLM has it."""
    model, dtype = save_scaled(tmp_path, family, written), FLOATS8[kv_cache_dtype]
    caches = {row: QuantizedCache(model.config, dtype, meant) for row in range(len(prompts()))}
    expected = {
        row: tiny_models.generate(model, prompts()[row], NEW_TOKENS, past_key_values=cache)
        for row, cache in caches.items()
    }
    check_ids(engine_of(tmp_path, kv_cache_dtype=kv_cache_dtype, block_size=16), expected)
    smaller = engine_of(tmp_path, kv_cache_dtype=kv_cache_dtype)
    assert play(smaller, dict(enumerate(prompts()))) == expected


def test_a_cache_has_room_for_four_times_the_tokens_of_float32(tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engines = [engine_of(tmp_path, kv_cache_dtype=name) for name in ("auto", "fp8_e5m2")]
    assert engines[1].ready.num_blocks // 4 == engines[0].ready.num_blocks
    for tensor in (*engines[1].loaded.cache.keys, *engines[1].loaded.cache.values):
        assert tensor.dtype == torch.float8_e5m2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *FLOATS8.values()])
def test_blocks_are_copied_in_all_layers(dtype: torch.dtype) -> None:
    layers = [LayerSpec(2, 1, None, 1.0, dim, 8) for dim in (8, 4)]
    cache = KVCache(Geometry(layers, 4, torch.float32, dtype), 9, torch.device("cpu"))
    for number, tensor in enumerate((*cache.keys, *cache.values)):
        raw(tensor).copy_((torch.arange(raw(tensor).numel()).view(tensor.shape) + number) % 100)
    before = [raw(tensor).clone() for tensor in (*cache.keys, *cache.values)]
    cache.copy([(3, 5), (3, 1), (7, 2)])
    for tensor, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(raw(tensor)[[5, 1, 2]], old[[3, 3, 7]])
        assert torch.equal(raw(tensor)[[0, 3, 4, 6, 7, 8, 9]], old[[0, 3, 4, 6, 7, 8, 9]])


@pytest.mark.parametrize(
    ("names", "scales"),
    [
        (("k_scale", "v_scale"), (0.25, 0.5)),
        (("k_proj.k_scale", "v_proj.v_scale"), (0.25, 0.5)),
        (("qkv_proj.k_scale", "qkv_proj.v_scale"), (0.25, 0.5)),
        (("k_proj.output_scale", "v_proj.output_scale"), (0.25, 0.5)),
        (("kv_scale", "q_scale"), (0.25, 0.25)),
        (("k_proj.weight_scale", "v_proj.input_scale"), (1.0, 1.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_scales_are_found(
    prefix: str, names: tuple[str, str], scales: tuple[float, float], tmp_path: Path
) -> None:
    """Also of the text part of a model that sees images; a layer without any has 1."""
    layers = [nn.ModuleDict({"self_attn": nn.Module()}) for _ in range(2)]
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList(layers)})})
    numbers = zip(names, (0.25, 0.5), strict=True)
    tensors = {f"{prefix}layers.1.self_attn.{name}": torch.tensor(number) for name, number in numbers}
    save_file(tensors, tmp_path / "model.safetensors")
    spec = LayerSpec(2, 1, None, 1.0, 16, 16)
    found = scale_layers(model, tmp_path, {layer["self_attn"]: spec for layer in layers})
    assert [(layer.key_scale, layer.value_scale) for layer in found.values()] == [(1.0, 1.0), scales]


# --- cpu paged ----------------------------------------------------------------------------------------------

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
        layer = LayerSpec(2, group, window, key_dim**-0.5, key_dim, value_dim, softcap)
        layer = replace(layer, key_scale=0.7, value_scale=0.002) if stored else layer
        geometry = Geometry([layer], block_size, dtype, stored or dtype)
        backend = CpuPagedBackend(geometry, library)
        pair = Pair(geometry, backend, ERRORS[dtype], exact_kv=stored or torch.float32)
        pair.caches[1].fill(list(range(BLOCKS + 1)), math.nan)
        pair.check_steps(None if sinks is None else sinks[: 2 * group])


@pytest.mark.parametrize("dtype", native.TYPE_CODES, ids=str)
@pytest.mark.parametrize("window", [None, 1100], ids=["all", "window"])
def test_bits_depend_neither_on_chunks_nor_on_how_work_is_split(
    dtype: torch.dtype, window: int | None, library: Any
) -> None:
    """A prompt at once; in chunks of odd sizes beside another row; and the last tokens one by one, each in
    several parts of its keys.
    """
    tokens, beside, sinks = 2500, 33, torch.randn(6)
    spec = LayerSpec(2, 3, window, 0.1, 64, 64)
    geometry = Geometry([spec], 16, dtype, dtype)
    states = [torch.randn(1, heads, tokens + beside, 64).to(dtype) for heads in (6, 2, 2)]
    blocks = np.split(np.arange(1, BLOCKS * 2, dtype=np.int32), [-(-tokens // 16)])
    row, other = (
        Row(number, np.zeros(length, np.int32), 9, blocks[number])
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
            backend.prepare_forward(build_inputs(StepSlices(slices), 16, CPU))
            places = [*range(begin, end), *range(tokens, tokens + others)]
            query, key, value = (state[:, :, places] for state in states)
            outputs.append(backend.attend(module, query, key, value, sinks))
        return torch.cat([output[:, : output.shape[1] - others] for output in outputs], 1)

    whole = attend([], 0)
    assert whole.isfinite().all()
    assert torch.equal(attend([700, 701, 2001], beside), whole)
    assert torch.equal(attend([1500, tokens - 2, tokens - 1], 0), whole)
