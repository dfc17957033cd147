"""Tiny models with states beside attention or in place of it, as in `tiny_models`."""

from typing import Any

from tests.support.engine.tiny_models import LATENT, LLAMA, MIXTURE, SIZES, WIDE

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
