"""Writes the model shapes that benchmarks/gpu/run.sh measures with random weights: `python -m
benchmarks.gpu.shapes FOLDER [TOKENIZER]`.

TOKENIZER is a folder with a tokenizer.json of 49,152 tokens; by default SmolLM2's is taken.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from common import model_files
from common.settings.settings import SettingError

COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "use_cache": True,
    "vocab_size": 49152,
    "dtype": "bfloat16",
    "max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "m8": {
        "hidden_size": 4096,
        "head_dim": 128,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "m135": {
        "hidden_size": 576,
        "head_dim": 64,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64,
        "head_dim": 32,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}
"""Of Llama 3.1 8B but for the vocabulary, of SmolLM2-135M, and one for a rehearsal on CPU."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write(folder: Path, tokenizer: Path) -> None:
    for name, shape in SHAPES.items():
        own = folder / name
        own.mkdir(parents=True, exist_ok=True)
        (own / "config.json").write_text(json.dumps(COMMON | shape, indent=1))
        for file in TOKENIZER_FILES:
            if (tokenizer / file).exists():
                shutil.copy(tokenizer / file, own)


def tokenizer_folder() -> Path:
    try:
        return model_files.resolve("smollm2")
    except SettingError as error:
        sys.exit(f"no tokenizer: TOKENIZER=FOLDER names one with SmolLM2's tokenizer.json ({error})")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    write(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else tokenizer_folder())
