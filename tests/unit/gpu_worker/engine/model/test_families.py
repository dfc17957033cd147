"""Every family of decoders, tiny and random: served with the ids of transformers' `generate`, or refused with
the cause.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.settings.settings import SettingError
from gpu_worker.engine.attention import sdpa
from gpu_worker.engine.attention.kv_cache import AttentionSpec, Geometry, LayerSpec
from gpu_worker.engine.cpu import fused_layer, native
from gpu_worker.engine.cpu.kernel_arguments import KernelArguments
from gpu_worker.engine.model import config, load
from gpu_worker.engine.model import rope as model_rope
from gpu_worker.engine.model.families import bloom_slopes, mpt_slopes
from tests.support.engine import tiny_models
from tests.support.engine.tiny_engine import MANY_NEW_TOKENS, NEW_TOKENS, check_ids, engine_of, play, prompts
from tests.support.engine.tiny_models import FAMILIES, GPT, LATENT, LLAMA, MIXTURE, SEEING, SIZES, VOCAB, rope

MOST_REPEATED = 0.625
"""Of the ids of an answer; others prove little."""
QUICK = (
    "Llama-longrope",
    "Qwen3-MoE",
    "Gemma2",
    "GPT2",
    "DeepSeek-V3",
    "gpt-oss",
)
SERVED = [
    *((name, NEW_TOKENS) for name in QUICK),
    *(pytest.param(name, MANY_NEW_TOKENS, marks=pytest.mark.slow) for name in FAMILIES | SEEING),
]
COMPRESSED = SIZES | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
}
INDEXED = LATENT | {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "sliding_window": 16}
REFUSED = {
    "GPTJ": (GPT, "is not served any more; GPT-NeoX"),
    "CodeGen": (GPT, "is not served any more; StarCoder2"),
    "XGLM": (SIZES | {"d_model": 64, "num_layers": 2, "attention_heads": 4}, "is not served any more; Qwen3"),
    "Mpt": (
        {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4, "attn_config": {"alibi": False}},
        "has no ALiBi",
    ),
    "Falcon": (SIZES | {"alibi": True}, "ALiBi"),
    "Llama4Text": (
        LLAMA | {"head_dim": 16, "attention_chunk_size": 16, "num_local_experts": 2},
        "chunked_attention; only",
    ),
    "DeepseekV4": (
        LLAMA | {"head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4},
        "heavily_compressed_attention; only",
    ),
    "Moshi": (
        LLAMA | {"ffn_dim": 128, "sliding_window": 16},
        "its cache has a window of 16 tokens and its mask none",
    ),
    "Rwkv": ({"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}, "no attention heads, and no"),
    "Zaya": (COMPRESSED, "ZayaCCAProjection, which has states, returns more than hidden states"),
    "Dots3NoteText": (
        LLAMA | {"head_dim": 16, "n_routed_experts": 4} | MIXTURE | INDEXED,
        "layers of type indexed_attention; only",
    ),
    "Helium": (LLAMA | {"head_dim": 8}, "the code of HeliumForCausalLM fails"),
}


Saved = tuple[Path, dict[int, list[int]]]
"""The folder of a model, and the ids that transformers generates for each prompt."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    @cache
    def save(family: str, new_tokens: int = NEW_TOKENS) -> Saved:
        folder = tmp_path_factory.mktemp("model")
        model = tiny_models.save(folder, *(FAMILIES | SEEING)[family])
        return folder, {
            row: tiny_models.generate(model, prompt, new_tokens) for row, prompt in enumerate(prompts())
        }

    return save


@pytest.mark.parametrize(("family", "new_tokens"), SERVED)
def test_ids_are_those_of_generate(family: str, new_tokens: int, saved: Callable[..., Saved]) -> None:
    folder, expected = saved(family, new_tokens)
    assert all(1 - len(set(ids)) / new_tokens <= MOST_REPEATED for ids in expected.values())
    check_ids(engine_of(folder), expected)


def without_windows(layers: list[LayerSpec], *rest: Any) -> Geometry:
    return Geometry([replace(layer, spec=replace(layer.spec, window=None)) for layer in layers], *rest)


def without(field: str) -> Callable[..., native.CacheStruct]:
    """A layer's cache as the native kernels see it, with one field set to zero."""

    def cache(self: KernelArguments, *arguments: Any) -> native.CacheStruct:
        made = cache_of(self, *arguments)
        setattr(made, field, 0)
        return made

    return cache


def uncapped(self: Any, queries: Any, keys: Any, bias: Any, spec: AttentionSpec) -> torch.Tensor:
    return torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=spec.scaling)


def of_one_kv_head(self: KernelArguments, *arguments: Any) -> native.CacheStruct:
    made = cache_of(self, *arguments)
    made.kv_heads, made.group = 1, made.kv_heads * made.group
    return made


def scaled_by_values(layers: list[LayerSpec], *rest: Any) -> Geometry:
    """As if K were as wide as V."""
    return Geometry(
        [replace(layer, spec=replace(layer.spec, scaling=layer.value_dim**-0.5)) for layer in layers], *rest
    )


def fused_with(**parts: Any) -> list[tuple[Any, str, Any]]:
    """Layers are fused whatever they compute."""

    def of(*arguments: Any) -> fused_layer.FusedLayers:
        made = fused_of(*arguments)
        for name, value in parts.items():
            setattr(made.layers[0], name, value)
        return made

    return [(fused_layer.FusedLayers, "of", of), (fused_layer, "is_close", lambda *tensors: True)]


def configured(**values: Any) -> list[tuple[Any, str, Any]]:
    """The model's config with other values: features that transformers' own code computes."""

    def read(*arguments: Any) -> Any:
        made = read_config(*arguments)
        for name, value in values.items():
            setattr(made, name, value)
        return made

    return [(load, "read_config", read)]


cache_of, fused_of, read_config = KernelArguments.make_cache, fused_layer.FusedLayers.of, config.read_config
PLAIN_ROPE = configured(**rope("default"))
FEATURES: dict[str, tuple[str, list[tuple[Any, str, Any]]]] = {
    "window": ("Mistral", [(load, "Geometry", without_windows)]),
    "softcap": ("Gemma2", [(KernelArguments, "make_cache", without("softcap"))]),
    "softcap, torch": ("Gemma2", [(sdpa.SdpaBackend, "scores", uncapped)]),
    "sinks": ("gpt-oss", [(KernelArguments, "make_cache", without("sinks"))]),
    "sinks, torch": (
        "gpt-oss",
        [(sdpa, "softmax_with_sinks", lambda scores, *rest: torch.softmax(scores, -1))],
    ),
    "ALiBi, torch": ("Bloom", [(sdpa, "falls_of", lambda spec, distances: np.float32(0))]),
    "grouped heads": ("Llama", [(KernelArguments, "make_cache", of_one_kv_head)]),
    "multi-head latent": ("DeepSeek-V3", [(load, "Geometry", scaled_by_values)]),
    "QK norm": (
        "Qwen3",
        fused_with(of_query=native.NormStruct(None, 0.0), of_key=native.NormStruct(None, 0.0)),
    ),
    "QK norm, Cohere": ("Cohere", configured(use_qk_norm=False)),
    "layers without rope": ("SmolLM3", fused_with(rotary=16)),
    "partial rotary": (
        "StableLM",
        configured(
            rope_parameters={"rope_theta": 10_000.0, "rope_type": "default", "partial_rotary_factor": 1.0}
        ),
    ),
    "experts": ("Qwen3-MoE", configured(num_experts_per_tok=1)),
    "linear": ("Llama-linear", PLAIN_ROPE),
    "llama3": ("Llama-llama3", PLAIN_ROPE),
    "yarn": ("Llama-yarn", PLAIN_ROPE),
    "dynamic": ("Llama-dynamic", [(model_rope, "replace_ropes", lambda model: [])]),
    "longrope": ("Llama-longrope", [(model_rope, "replace_ropes", lambda model: [])]),
    "longrope, by type": ("Gemma3-longrope", [(model_rope, "replace_ropes", lambda model: [])]),
    "longrope, anew": ("Phi3-longrope", [(model_rope, "recompute_length", lambda model: None)]),
}
NATIVE = (KernelArguments, fused_layer.FusedLayers, fused_layer)
TRIED = [
    pytest.param(feature, marks=[] if family in QUICK else pytest.mark.slow)
    for feature, (family, _) in FEATURES.items()
]


@pytest.mark.parametrize("feature", TRIED)
def test_ids_differ_without_the_feature(
    feature: str, saved: Callable[..., Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above would fail without it."""
    family, off = FEATURES[feature]
    if "torch" in feature:
        monkeypatch.setattr(native, "library", lambda: None)
    elif off[0][0] in NATIVE and native.library() is None:
        pytest.skip("no C++ compiler")
    folder, expected = saved(family)
    for owner, name, value in off:
        monkeypatch.setattr(owner, name, value)
    assert play(engine_of(folder), dict(enumerate(prompts()))) != expected


@pytest.mark.parametrize("family", REFUSED)
def test_unservable_families_are_refused_with_the_cause(family: str, tmp_path: Path) -> None:
    sizes, words = REFUSED[family]
    tiny_models.save(tmp_path, family, sizes)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=words) as caught:
        engine_of(tmp_path)
    assert caught.value.name == "model_id" and "\n" not in str(caught.value)


def test_layers_that_mix_tokens_outside_attention_and_states_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the config says of its layers: MiniMax' have states in a cache of its own."""
    sizes = LLAMA | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    tiny_models.save(tmp_path, "MiniMax", sizes | {"num_local_experts": 2, "head_dim": 16})
    with pytest.raises(SettingError, match="see each other by other ways than attention"):
        engine_of(tmp_path)


def test_masks_other_than_causal_or_window_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "LAYER_TYPES", {"full_attention", "chunked_attention"})
    tiny_models.save(tmp_path, "Llama4Text", REFUSED["Llama4Text"][0])  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="neither causal nor a sliding window"):
        engine_of(tmp_path)


def test_attention_that_counts_tokens_by_its_own_cache_is_refused(tmp_path: Path) -> None:
    """Llama 4's, which scales queries by it in layers without rotary positions."""
    tiny_models.save(
        tmp_path,
        "Llama4Text",
        REFUSED["Llama4Text"][0] | {"layer_types": ["full_attention"] * 3},  # type: ignore[operator]
    )
    with pytest.raises(SettingError, match="counts tokens by a cache of its own"):
        engine_of(tmp_path)


@pytest.mark.parametrize("slopes_of", [bloom_slopes, mpt_slopes])
def test_slopes_are_computed_once(slopes_of: Callable[[int], tuple[float, ...]]) -> None:
    """Every layer asks for them in every step."""
    assert slopes_of(8) is slopes_of(8) and len(slopes_of(12)) == 12
