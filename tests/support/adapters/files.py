"""Files of LoRA adapters, as PEFT writes them, without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def write_adapter(folder: Path, rank: int = 8, seed: int = 0, **config: Any) -> Path:
    """Write an adapter of one small matrix; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(described))
    draw = np.random.default_rng(seed)
    factors = {"A": (rank, 4), "B": (4, rank)}
    tensors = {
        f"{LAYER}.lora_{name}.weight": draw.random(shape, np.float32) for name, shape in factors.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
