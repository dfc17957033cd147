"""python -m gpu_worker.engine.convert SOURCE.gguf FOLDER: the model in a GGUF file as plain bfloat16 weights, tokenizer and configs."""

import sys
from functools import cache
from pathlib import Path

import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from common.lifeline import die_with_parent


def read_once() -> None:
    """transformers parses the whole file for the tokenizer, for the config and for the weights, and makes the table of the names of all
    tensors anew for each module: that is half of the time."""
    for function in (gguf.GGUFReader, gguf.get_tensor_name_map):
        setattr(gguf, function.__name__, cache(function))


def main() -> None:
    die_with_parent()  # who waits for us holds the lock
    read_once()
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
