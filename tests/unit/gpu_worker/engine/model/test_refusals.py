"""What an engine cannot serve is refused at its start, by the name of the setting."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.settings.settings import SettingError
from gpu_worker.engine.model import weights as config
from tests.support.engine import tiny_models
from tests.support.engine.pictures import models as pictures
from tests.support.engine.tiny_engine import engine_of
from tests.support.engine.tiny_models import ENCODER_DECODERS, FAMILIES, GPT, HYBRIDS, LLAMA, SIZES, T5, VOCAB
from tests.support.pooling.tiny_encoders import save_encoder, save_modules

Change = Callable[[Path], object]


class Refused(NamedTuple):
    """What is served, and the words and the setting with which it is refused."""

    words: str
    family: tuple[str, dict[str, Any]] = FAMILIES["Llama"]
    setting: str = "model_id"
    settings: dict[str, Any] = {}  # noqa: RUF012  nobody changes it
    config: dict[str, Any] = {}  # noqa: RUF012
    change: Change | None = None


def tensors(layer: str = "model.layers.1.", **changes: Any) -> Change:
    """Puts tensors of a layer in place of others, or makes them of those that are there; None: removes."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        held = load_file(file)
        for name, made in changes.items():
            name = layer + name.replace("__", ".")
            held[name] = made(held[name]) if callable(made) else made
        whole = {name: tensor for name, tensor in held.items() if tensor is not None}
        save_file(whole, file, {"format": "pt"})

    return change


def misshapen_tower(folder: Path) -> None:
    pictures.save(folder, "Qwen2-VL")
    tensors("visual.blocks.0.", norm1__weight=torch.ones(3))(folder)


def content(change: Callable[[bytes], bytes]) -> Change:
    """Damages the file of weights."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return damage


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def pooling(name: str, content: str) -> Change:
    """Makes an encoder, and writes one of its files of sentence-transformers."""

    def write(folder: Path) -> None:
        save_encoder(folder, "BERT")
        save_modules(folder)
        (folder / name).write_text(content)

    return write


def encoder(folder: Path) -> None:
    save_encoder(folder, "BERT")


COMPRESSED = SIZES | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
}
CHUNKED = LLAMA | {"head_dim": 16, "attention_chunk_size": 16, "num_local_experts": 2}
MINIMAX = (
    LLAMA
    | {"num_local_experts": 2, "head_dim": 16}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
)
"""It has states in a cache of its own, whatever the config says of its layers."""
GPT_NEO = SIZES | {"num_layers": 3, "num_heads": 4, "attention_types": [[["global"], 3]]}
WITHOUT_ALIBI = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
    "attn_config": {"alibi": False},
}
COMPRESSED_TENSORS = {"quant_method": "compressed-tensors"}
QUANTISED: list[tuple[dict[str, Any], str]] = [
    (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        "its weights are packed as marlin; gptq and gptq_v2 are read",
    ),
    ({"quant_method": "gptq", "bits": 5}, "it has 5 bits; 2, 3, 4 and 8 are read"),
    (
        COMPRESSED_TENSORS | {"format": "nvfp4-pack-quantized"},
        "its format is nvfp4-pack-quantized; .*pack-quantized.* are read",
    ),
    (
        COMPRESSED_TENSORS | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        r"its weights are sparse \(sparse-24-bitmask\)",
    ),
    ({"quant_method": "hqq"}, r"is quantised \(hqq\): .*[Hh][Qq][Qq]"),
    ({"bits": 4}, r"is quantised \(method not named\)"),
    ({"quant_method": "exl2", "bits": 4.65}, r"is quantised \(exl2\): ExLlamaV2's layout .* is not read"),
]
PLAIN = "this checkpoint's weights are plain; "
OTHERS: list[tuple[dict[str, Any] | None, str, str]] = [
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes-fp4",
        r"weights are loaded as the checkpoint has them \(bitsandbytes-nf4\)$",
    ),
    (None, "gptq", f"{PLAIN}`tokenfleet quantize MODEL OUT` makes such a checkpoint$"),
    (
        None,
        "hqq",
        f"{PLAIN}fp8, bitsandbytes, bitsandbytes-nf4, bitsandbytes-fp4, eetq are made of such at load$",
    ),
]
DAMAGES: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda data: data[:-7], "file not fully covered"),
    (lambda data: data + b"0", "file not fully covered"),
    (lambda data: data[:8] + b"\xff" * 9000, "header"),
    (lambda data: b"\xff" * 100, "header too large"),
    (lambda data: b"", "header too small"),
]
DAMAGED = r"^MODEL_ID: (\S+) cannot be served: \1/model\.safetensors is damaged, or no safetensors file: .*"
POOLING = "1_Pooling/config.json"
POOLINGS = [
    (POOLING, '{"pooling_mode_weightedmean_tokens": true}', "weightedmean; one of cls, mean"),
    (
        POOLING,
        '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}',
        "pools by cls and mean; one of",
    ),
    ("modules.json", "[" * 100_000, "is not JSON"),
    ("modules.json", "{}", "is no JSON list of objects"),
    ("modules.json", "[1]", "is no JSON list of obj"),
]
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
T5_LAYER = "decoder.block.1.layer.1.EncDecAttention."
SCALE = r"model\.layers\.1\.self_attn\.k_scale "
REFUSED = [
    Refused("has no ALiBi", ("Mpt", WITHOUT_ALIBI)),
    Refused("ALiBi", ("Falcon", SIZES | {"alibi": True})),
    Refused("chunked_attention; only", ("Llama4Text", CHUNKED)),
    # its layers without rotary positions scale queries by the cache's count
    Refused(
        "counts tokens by a cache of its own",
        ("Llama4Text", CHUNKED | {"layer_types": ["full_attention"] * 3}),
    ),
    Refused(
        "its cache has a window of 16 tokens and its mask none",
        ("Moshi", LLAMA | {"ffn_dim": 128, "sliding_window": 16}),
    ),
    Refused(
        "no attention heads, and no",
        ("Rwkv", {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}),
    ),
    Refused("ZayaCCAProjection, which has states, returns more than hidden states", ("Zaya", COMPRESSED)),
    Refused("is not served any more; GPT-NeoX", ("GPTJ", GPT)),
    Refused("is not served any more; StarCoder2", ("CodeGen", GPT)),
    Refused(
        "is not served any more; Qwen3",
        ("XGLM", SIZES | {"d_model": 64, "num_layers": 2, "attention_heads": 4}),
    ),
    Refused("the code of HeliumForCausalLM fails", ("Helium", LLAMA | {"head_dim": 8})),
    Refused("see each other by other ways than attention", ("MiniMax", MINIMAX)),
    Refused("encoder-decoder model of type longt5; served are bart", ("LongT5", T5)),
    Refused("is not served with an encoder-decoder", ENCODER_DECODERS["T5"], "kv_cache_dtype", FP8),
    Refused(
        "is an encoder-decoder model of type bart, and is quantised; such are served with plain weights",
        ENCODER_DECODERS["BART"],
        config={"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ),
    Refused(
        rf"has no weights for {T5_LAYER}q\.weight$",
        ENCODER_DECODERS["T5"],
        change=tensors(T5_LAYER, q__weight=None),
    ),
    Refused(
        rf"has weights of type F8_E4M3 \({T5_LAYER}q",
        ENCODER_DECODERS["T5"],
        change=tensors(T5_LAYER, q__weight=lambda weight: weight.to(torch.float8_e4m3fn)),
    ),
    Refused(r"no whole set of \.safetensors files", ENCODER_DECODERS["T5"], change=pickled),
    Refused(
        r"has no weights for model\.layers\.1\.mlp\.up_proj\.weight of shape \[128, 64\]$",
        change=tensors(mlp__up_proj__weight=torch.ones(3, 3)),
    ),
    Refused(
        r"no weights for model\.visual\.blocks\.0\.norm1\.weight of shape \[32\]$", change=misshapen_tower
    ),
    Refused("the attention of gpt_neo cannot be replaced", ("GPTNeo", GPT_NEO)),
    Refused(
        r"the code of phimoe fails: KeyError\('original_max_position_embeddings'\)",
        ("Phimoe", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
        settings={"rope_factor": 2.0},
    ),
    *(Refused(words, config={"quantization_config": one}) for one, words in QUANTISED),
    Refused(
        r"has weights of type F8_E4M3 \(model\.layers\.1\.\S+\), and its config\.json says nothing of them",
        change=tensors(mlp__up_proj__weight=lambda weight: weight.to(torch.float8_e4m3fn)),
    ),
    *(Refused(DAMAGED + fault, change=content(damage)) for damage, fault in DAMAGES),
    *(
        Refused(
            f"^QUANTIZE: {asked} is not served: {why}",
            setting="quantize",
            settings={"quantize": asked},
            config={"quantization_config": own} if own else {},
        )
        for own, asked, why in OTHERS
    ),
    Refused(r"has no whole set of \.safetensors files .*LOAD_FORMAT=dummy", change=pickled),
    Refused(
        "dummy makes plain weights, but .* is quantised",
        setting="load_format",
        settings={"load_format": "dummy"},
        config={"quantization_config": {"quant_method": "fp8"}},
    ),
    Refused(
        "gpt2 has no plain rotary positions to stretch", FAMILIES["GPT2"], "rope_factor", {"rope_factor": 2.0}
    ),
    Refused(
        "gemma3_text has no plain rotary positions", FAMILIES["Gemma3"], "rope_factor", {"rope_factor": 2.0}
    ),
    # GPT-2's are of transformers' own kind
    Refused(
        "fp8, but GPT2LMHeadModel has no linear layers", FAMILIES["GPT2"], "quantize", {"quantize": "fp8"}
    ),
    Refused(".*0 of its 3 layers", FAMILIES["Gemma2"], "deterministic", {"deterministic": True}),
    Refused(".*0 of its 3 layers", FAMILIES["GPT2"], "deterministic", {"deterministic": True}),
    Refused(
        "its states are computed with those of the rows beside",
        HYBRIDS["Granite4"],
        "deterministic",
        {"deterministic": True},
    ),
    Refused(
        "half of 1000 bytes are too few: the states of one row take",
        HYBRIDS["Granite4"],
        "kv_cache_bytes",
        {"kv_cache_bytes": 1000},
    ),
    Refused(
        SCALE + "has 2 numbers; a cache of 8-bit floats has one",
        settings=FP8,
        change=tensors(self_attn__k_scale=torch.ones(2)),
    ),
    Refused(
        SCALE + r"is -1\.0, and must be more than 0",
        settings=FP8,
        change=tensors(self_attn__k_scale=torch.tensor(-1.0)),
    ),
    *(Refused(words, change=pooling(name, text)) for name, text, words in POOLINGS),
    Refused("pools by mean: of a decoder, .* only lasttoken is served", change=save_modules),
    Refused(
        "generate, but .* is an encoder, which makes no text",
        setting="runner",
        settings={"runner": "generate"},
        change=encoder,
    ),
    Refused(
        "fp8 is not served for encoders", setting="quantize", settings={"quantize": "fp8"}, change=encoder
    ),
    Refused(
        r"has 3 labels: only models with one score \(rerankers\)",
        change=lambda folder: save_encoder(folder, "BERT", 3),
    ),
]


@pytest.mark.parametrize("one", REFUSED, ids=lambda one: one.words)
def test_what_cannot_be_served_is_refused_by_name(one: Refused, tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *one.family)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | one.config))
    if one.change:
        one.change(tmp_path)
    with pytest.raises(SettingError, match=one.words) as caught:
        engine_of(tmp_path, **one.settings)
    assert caught.value.name == one.setting and "\n" not in str(caught.value)


def test_masks_other_than_causal_or_window_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "LAYER_TYPES", {"full_attention", "chunked_attention"})
    tiny_models.save(tmp_path, "Llama4Text", CHUNKED)
    with pytest.raises(SettingError, match="neither causal nor a sliding window"):
        engine_of(tmp_path)
