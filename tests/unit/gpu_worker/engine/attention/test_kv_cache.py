"""Caches: 8-bit floats give the ids of a plain implementation that rounds K and V alike; latents (MLA);
scales.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from common.settings.settings import SettingError
from gpu_worker.engine.attention.backend import (
    FLOATS8,
    AttentionSpec,
    Geometry,
    KVCache,
    LayerSpec,
    raw,
)
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model.warmup import scale_layers
from tests.support.engine import tiny_models
from tests.support.engine.tiny_engine import NEW_TOKENS, engine_of, play, prompts
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


@torch.inference_mode()
def quantized_ids(
    folder: Path, prompt: list[int], count: int, dtype: torch.dtype, scales: Scales
) -> tuple[list[int], torch.Tensor]:
    """Greedy, float32 → so many new ids, and the logits [vocabulary] of the first."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache, ids, found = QuantizedCache(model.config, dtype, scales), prompt, []
    first = None
    for _ in range(count):
        logits = model(torch.tensor([ids]), past_key_values=cache).logits[0, -1]
        first = logits if first is None else first
        ids = [int(logits.argmax())]
        found += ids
    assert first is not None
    return found, first


SCALES = {0: (0.03, 0.002), 2: (1.5, 4.0)}
"""Of some layers: K and V that are saturated, and such as lie among the smallest numbers."""


def engine_with_cache(folder: Path, kv_cache_dtype: str, block_size: int = 16, **settings: Any) -> Engine:
    chosen: dict[str, Any] = {
        "kv_cache_bytes": 2**20,
        "block_size": block_size,
        "kv_cache_dtype": kv_cache_dtype,
    }
    return engine_of(folder, **chosen | settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, with scales in some of its layers."""
    path = tmp_path_factory.mktemp("scaled")
    tiny_models.save(path, *FAMILIES["Llama"])
    rewrite(
        path, {number: (torch.tensor(key), torch.tensor([value])) for number, (key, value) in SCALES.items()}
    )
    return path


def rewrite(folder: Path, scales: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Scales as compressed-tensors writes them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for number, (key, value) in scales.items():
        attention = f"model.layers.{number}.self_attn"
        tensors |= {f"{attention}.k_scale": key, f"{attention}.v_scale": value}
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("kv_cache_dtype", FLOATS8)
def test_ids_are_those_of_a_plain_implementation(folder: Path, kv_cache_dtype: str) -> None:
    """In a batch, in chunks, resumed, and with blocks of another size."""
    rows = dict(enumerate(prompts()))
    dtype = FLOATS8[kv_cache_dtype]
    expected = {row: quantized_ids(folder, ids, NEW_TOKENS, dtype, SCALES)[0] for row, ids in rows.items()}
    engine = engine_with_cache(folder, kv_cache_dtype)
    assert play(engine, rows) == expected
    assert play(engine, rows, prefill_tokens=7) == expected
    resumed = {row: [*ids, *expected[row][:9]] for row, ids in rows.items()}
    assert play(engine, resumed, base=9) == {row: ids[9:] for row, ids in expected.items()}
    assert play(engine_with_cache(folder, kv_cache_dtype, block_size=8), rows) == expected


def test_a_cache_has_room_for_four_times_the_tokens_of_float32(folder: Path) -> None:
    engines = [engine_with_cache(folder, name) for name in ("auto", "fp8_e5m2")]
    assert engines[1].ready.num_blocks // 4 == engines[0].ready.num_blocks
    for tensor in (*engines[1].loaded.cache.keys, *engines[1].loaded.cache.values):
        assert tensor.dtype == torch.float8_e5m2


@pytest.mark.parametrize(
    ("scale", "line"),
    [
        (torch.ones(2), "k_scale has 2 numbers; a cache of 8-bit floats has one for a layer"),
        (torch.tensor(-1.0), "k_scale is -1.0, and must be more than 0"),
    ],
)
def test_other_scales_are_refused(scale: torch.Tensor, line: str, tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    rewrite(tmp_path, {1: (scale, torch.tensor(1.0))})
    with pytest.raises(SettingError, match=rf"model\.layers\.1\.self_attn\.{line}"):
        engine_with_cache(tmp_path, "fp8_e4m3")
    engine_with_cache(tmp_path, "auto")


def test_latents_have_the_scale_of_k(tmp_path: Path) -> None:
    """One for the latent and its rotary part, as vLLM has it; the scale of V is that of nothing."""
    tiny_models.save(tmp_path, *FAMILIES["DeepSeek-V3"])
    rewrite(tmp_path, {1: (torch.tensor(0.5), torch.tensor(7.0))})
    rows = dict(enumerate(prompts()))
    scales = {1: (0.5, 0.5)}
    expected = {
        row: quantized_ids(tmp_path, ids, NEW_TOKENS, FLOATS8["fp8_e4m3"], scales)[0]
        for row, ids in rows.items()
    }
    engine = engine_with_cache(tmp_path, "fp8_e4m3")
    assert play(engine, rows) == expected
    assert play(engine, rows, prefill_tokens=7) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *FLOATS8.values()])
def test_blocks_are_copied_in_all_layers(dtype: torch.dtype) -> None:
    spec = AttentionSpec(2, 1, None, 1.0)
    layers = [LayerSpec(spec, 8, 8), LayerSpec(spec, 4, 8)]
    cache = KVCache(Geometry(layers, 4, torch.float32, dtype), 9, torch.device("cpu"))
    for number, tensor in enumerate((*cache.keys, *cache.values)):
        raw(tensor).copy_((torch.arange(raw(tensor).numel()).view(tensor.shape) + number) % 100)
    before = [raw(tensor).clone() for tensor in (*cache.keys, *cache.values)]
    cache.copy([(3, 5), (3, 1), (7, 2)])
    for tensor, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(raw(tensor)[[5, 1, 2]], old[[3, 3, 7]])
        assert torch.equal(raw(tensor)[[0, 3, 4, 6, 7, 8, 9]], old[[0, 3, 4, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("latent")
    tiny_models.save(folder, *FAMILIES["DeepSeek-V3"])
    return engine_of(folder, block_size=16)


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
    spec = LayerSpec(AttentionSpec(2, 1, None, 1.0), 16, 16)
    found = scale_layers(model, tmp_path, {layer["self_attn"]: spec for layer in layers})
    assert [(layer.key_scale, layer.value_scale) for layer in found.values()] == [(1.0, 1.0), scales]
