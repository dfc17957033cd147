"""Tiny models with random weights, of every family that is served, made so that each feature of its attention
shows in the ids.

Tiny models with states beside attention or in place of it, as in `tiny_models`.
"""

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models

from common import model_files
from tests.support.engine.tiny_tokenizers import byte_tokenizer

VOCAB = 500
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = SIZES | {"intermediate_size": 128, "num_key_value_heads": 2}
SPEAKING = LLAMA | {"vocab_size": 49_152, "eos_token_id": 2, "tie_word_embeddings": True}
"""With room for the ids of the bundled tokenizer."""
T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "initializer_factor": 1.0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
GPT = {
    "vocab_size": VOCAB,
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 64,
    "n_positions": 256,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}
MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
WIDE = {"head_dim": 32}
SPREAD = {"initializer_range": 0.5}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


def by_type(**ropes: dict[str, Any]) -> dict[str, Any]:
    """Default in layers of other types."""
    sides = {"sliding_attention": rope("default"), "full_attention": rope("default")} | ropes
    return {"rope_parameters": {layer_type: side["rope_parameters"] for layer_type, side in sides.items()}}


LONG = {
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 32,
}
WIDE_LONG = LONG | {"short_factor": [1.0] * 16, "long_factor": [2.0 + i for i in range(16)]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", LLAMA),
    "Llama-tied": ("Llama", LLAMA | {"tie_word_embeddings": True}),
    "Llama-linear": ("Llama", LLAMA | rope("linear", factor=4.0)),
    "Llama-llama3": (
        "Llama",
        LLAMA
        | rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "Llama-yarn": ("Llama", LLAMA | rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "Llama-dynamic": ("Llama", LLAMA | {"max_position_embeddings": 32} | rope("dynamic", factor=4.0)),
    "Llama-longrope": ("Llama", LLAMA | rope("longrope", factor=4.0, **LONG)),
    "Mistral": ("Mistral", LLAMA | {"sliding_window": 16}),
    "Ministral3": (
        "Ministral3",
        LLAMA
        | {"head_dim": 16}
        | rope("yarn", factor=8.0, original_max_position_embeddings=32, llama_4_scaling_beta=1.0),
    ),
    "Mixtral": ("Mixtral", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
    "Qwen2": ("Qwen2", LLAMA | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "Qwen2-MoE": ("Qwen2Moe", LLAMA | MIXTURE | {"num_experts": 4, "shared_expert_intermediate_size": 32}),
    "Qwen3": ("Qwen3", LLAMA | WIDE),
    "Qwen3-MoE": ("Qwen3Moe", LLAMA | WIDE | MIXTURE | {"num_experts": 4}),
    "Gemma2": (
        "Gemma2",
        LLAMA | WIDE | {"sliding_window": 16, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32},
    ),
    "Gemma3": ("Gemma3Text", LLAMA | WIDE | MIXED | SPREAD),
    "Gemma3-dynamic": (
        "Gemma3Text",
        LLAMA
        | WIDE
        | MIXED
        | SPREAD
        | {"max_position_embeddings": 32}
        | by_type(full_attention=rope("dynamic", factor=4.0)),
    ),
    "Gemma3-longrope": (
        "Gemma3Text",
        LLAMA | WIDE | MIXED | SPREAD | by_type(full_attention=rope("longrope", factor=4.0, **WIDE_LONG)),
    ),
    "Phi": ("Phi", LLAMA | {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "Phi3": ("Phi3", LLAMA | {"sliding_window": 16}),
    "Phi3-longrope": (
        "Phi3",
        LLAMA | {"original_max_position_embeddings": 32} | rope("longrope", factor=4.0, **LONG),
    ),
    "Phi-MoE-longrope": (
        "Phimoe",
        LLAMA
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "original_max_position_embeddings": 32,
        }
        | rope("longrope", factor=4.0, short_mscale=1.0, long_mscale=1.5, **LONG),
    ),
    "HunYuan-MoE": ("HunYuanMoEV1", LLAMA | {"head_dim": 16, "num_experts": 4, "moe_topk": 2}),
    "GPT2": ("GPT2", GPT),
    "GPT-NeoX": ("GPTNeoX", SIZES | SPREAD | {"intermediate_size": 128}),
    "StarCoder2": ("Starcoder2", LLAMA | SPREAD | {"sliding_window": 16}),
    "GPT-BigCode": ("GPTBigCode", GPT),
    "OPT": ("OPT", SIZES | SPREAD | {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "Falcon": (
        "Falcon",
        SIZES | SPREAD | {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "Falcon-7b": (
        "Falcon",
        SIZES | SPREAD | {"alibi": False, "new_decoder_architecture": False, "multi_query": True},
    ),
    "Bloom": ("Bloom", SIZES | {"num_hidden_layers": 2, "initializer_range": 0.1}),
    "MPT": (
        "Mpt",
        {"vocab_size": VOCAB, "d_model": 64, "n_layers": 4, "n_heads": 8, "max_seq_len": 256}
        | {"initializer_range": 0.22, "tie_word_embeddings": True},
    ),
    "OLMo2": ("Olmo2", LLAMA | SPREAD),
    "Cohere": ("Cohere", LLAMA | {"use_qk_norm": True, "logit_scale": 0.25}),
    "Cohere2": ("Cohere2", LLAMA | MIXED | {"logit_scale": 0.25}),
    "Granite": ("Granite", LLAMA | {"logits_scaling": 4.0, "attention_multiplier": 0.3}),
    "SmolLM3": ("SmolLM3", LLAMA | {"no_rope_layers": [1, 0, 1], "use_sliding_window": False}),
    "StableLM": ("StableLm", LLAMA | {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "DeepSeek-V3": (
        "DeepseekV3",
        LLAMA
        | MIXTURE
        | LATENT
        | {
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
    "DeepSeek-V2-dynamic": (
        "DeepseekV2",
        LLAMA
        | MIXTURE
        | LATENT
        | {"n_routed_experts": 4, "first_k_dense_replace": 1, "max_position_embeddings": 32}
        | rope("dynamic", factor=4.0),
    ),
    "DeepSeek-V2": (
        "DeepseekV2",
        LLAMA | MIXTURE | LATENT | {"n_routed_experts": 4, "first_k_dense_replace": 1, "q_lora_rank": None},
    ),
    "GLM4-MoE-Lite": ("Glm4MoeLite", LLAMA | MIXTURE | LATENT | {"n_routed_experts": 4}),
    "LongCat": (
        "LongcatFlash",
        SIZES
        | LATENT
        | {"num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 64}
        | {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "head_dim": 8},
    ),
    "MiniCPM3": ("MiniCPM3", LLAMA | LATENT | {"scale_emb": 1, "scale_depth": None, "dim_model_base": None}),
    "Youtu": ("Youtu", LLAMA | LATENT),
    "AXK1": (
        "AXK1",
        LLAMA | MIXTURE | LATENT | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    ),
    "Arcee": ("Arcee", LLAMA),
    "Seed-OSS": ("SeedOss", LLAMA | {"head_dim": 16}),
    "OLMo3": ("Olmo3", LLAMA | SPREAD | MIXED),
    "EXAONE4": ("Exaone4", LLAMA | MIXED),
    "gpt-oss": ("GptOss", LLAMA | WIDE | MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Ministral3-images": (  # of which the part for text is served
        "Mistral3",
        {
            "text_config": LLAMA | {"model_type": "ministral3", "head_dim": 16},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "tie_word_embeddings": False,
        },
    ),
}
KINDS: dict[str, Any] = {
    "is_encoder_decoder": transformers.AutoModelForSeq2SeqLM,
    "vision_config": transformers.AutoModelForImageTextToText,
}
"""By what a config says."""
BART = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "init_std": 0.25,
    "tie_word_embeddings": False,
}
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "T5": ("T5", T5),
    "mT5": (
        "MT5",
        T5 | {"vocab_size": VOCAB, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "BART": ("Bart", BART),
    "BART-forced": ("Bart", BART | {"forced_bos_token_id": 7}),
    "mBART": ("MBart", BART | {"scale_embedding": True}),
    "Pegasus": ("Pegasus", BART),
}


def save(folder: Path, config_name: str, sizes: dict[str, Any]) -> Any:
    """Writes a random model of the family of `config_name`, with a tokenizer in name only; returns it as it
    is read again, in float32, with attention written out: transformers 5.17 leaves soft-capping out of
    torch's own.
    """
    torch.manual_seed(1)
    config = getattr(transformers, f"{config_name}Config")(**sizes)
    kind = next(
        (kind for part, kind in KINDS.items() if getattr(config, part, None)),
        transformers.AutoModelForCausalLM,
    )
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = (
                2.0
                if name.endswith("sinks")
                else 0.1
                if name.endswith("bias")
                else getattr(config.get_text_config(), "initializer_range", 0.25)
                if weight.dim() > 1
                else 0.0
            )
            if spread:
                weight.normal_(0, spread)
    model.save_pretrained(folder)
    Tokenizer(models.WordLevel({}, "")).save(str(folder / "tokenizer.json"))
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def save_with_tokenizer(folder: Path, config_name: str, sizes: dict[str, Any]) -> Path:
    """As `save`, with the bundled model's tokenizer, whose ids the vocabulary must hold → the folder."""
    save(folder, config_name, sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_files.resolve("smollm2") / name, folder)
    return folder


def save_with_bytes(folder: Path, config_name: str, sizes: dict[str, Any]) -> Path:
    """As `save`, with a tokenizer whose tokens are bytes → the folder."""
    save(folder, config_name, sizes)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def generate(model: Any, prompt: list[int], max_new_tokens: int, **options: Any) -> list[int]:
    """Greedy new ids, of an encoder-decoder model those after the ids that start the decoder. On a copy:
    rotary embeddings of some types remember the longest sequence they saw.
    """
    ids = torch.tensor([prompt])
    settings = {
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    is_forced = model.config.is_encoder_decoder and model.generation_config.forced_bos_token_id is not None
    most = max_new_tokens + is_forced
    output = copy.deepcopy(model).generate(ids, max_new_tokens=most, **settings | options)
    begin = 1 + is_forced if model.config.is_encoder_decoder else len(prompt)
    new_ids: list[int] = output[0, begin:].tolist()
    return new_ids


# --- hybrid models ------------------------------------------------------------------------------------------

MIXED_LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SHORT = {"layer_types": ["conv", "full_attention", "conv"]}
WITHOUT_HEADS = {name: size for name, size in SIZES.items() if name != "num_attention_heads"}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
DEEP = {"num_hidden_layers": 4, "num_key_value_heads": 4}
ALTERNATING = {"layers_block_type": ["linear_attention", "hybrid"] * 2}
SHARED = {"shared_expert_intermediate_size": 32, "num_experts": 4}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LFM2": ("Lfm2", LLAMA | SHORT | {"block_auto_adjust_ff_dim": False}),
    "LFM2-MoE": ("Lfm2Moe", LLAMA | SHORT | MIXTURE | {"num_experts": 4, "num_dense_layers": 1}),
    "LFM3": (
        "Lfm3",
        LLAMA | {"layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 16},
    ),
    "Mamba": ("Mamba", WITHOUT_HEADS | {"state_size": 16}),
    "Mamba2": (
        "Mamba2",
        WITHOUT_HEADS | {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    ),
    "FalconMamba": ("FalconMamba", WITHOUT_HEADS | {"state_size": 16}),
    "Granite4": (
        "GraniteMoeHybrid",
        LLAMA | MIXTURE | MIXED_LAYERS | MAMBA2 | {"num_local_experts": 4, "shared_intermediate_size": 64},
    ),
    "Bamba": ("Bamba", LLAMA | MAMBA2 | {"attn_layer_indices": [1]}),
    "FalconH1": (
        "FalconH1",
        LLAMA | MAMBA2 | {"mamba_d_ssm": 128, "key_multiplier": 1.0, "lm_head_multiplier": 1.0},
    ),
    "Jamba": (
        "Jamba",
        LLAMA
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_dt_rank": 8},
    ),
    "Nemotron-H": (
        "NemotronH",
        LLAMA
        | WIDE
        | MIXTURE
        | {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8}
        | {"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 64, "n_group": 1, "topk_group": 1},
    ),
    "Qwen3-Next": ("Qwen3Next", LLAMA | WIDE | MIXTURE | MIXED_LAYERS | DELTA | SHARED),
    "Qwen3.5": ("Qwen3_5Text", LLAMA | WIDE | MIXED_LAYERS | DELTA),
    "Qwen3.5-MoE": ("Qwen3_5MoeText", LLAMA | WIDE | MIXTURE | MIXED_LAYERS | DELTA | SHARED),
    "OLMo-Hybrid": ("OlmoHybrid", LLAMA | MIXED_LAYERS | DELTA | {"linear_num_key_heads": 4}),
    "Kimi-Linear": (
        "KimiLinear",
        LLAMA
        | LATENT
        | MIXTURE
        | MIXED_LAYERS
        | {"q_lora_rank": None, "num_experts": 4, "linear_head_dim": 16, "linear_num_heads": 4},
    ),
    "Bailing-Hybrid": (
        "BailingHybrid",
        LLAMA
        | LATENT
        | MIXTURE
        | MIXED_LAYERS
        | {"num_experts": 4, "n_group": 2, "topk_group": 1, "head_dim": 16, "first_k_dense_replace": 1},
    ),
    "Zamba": (
        "Zamba",
        LLAMA | DEEP | ALTERNATING | {"n_mamba_heads": 2, "mamba_d_state": 16, "mamba_expand": 2},
    ),
    "Zamba2": (
        "Zamba2",
        LLAMA
        | DEEP
        | ALTERNATING
        | {"attention_head_dim": 32, "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_d_state": 16}
        | {"mamba_ngroups": 2, "chunk_size": 8, "mamba_expand": 2, "num_mem_blocks": 1},
    ),
}
