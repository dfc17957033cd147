"""python -m gpu_worker.engine.model.gguf SOURCE.gguf FOLDER [DTYPE]: writes the model in a GGUF file as plain
weights, blocks, tokenizer and configs.
"""

import sys
from functools import cache, reduce
from pathlib import Path

import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from common.process.parent_death import die_with_parent
from gpu_worker.engine.model.gguf_blocks import write_blocks

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def cache_gguf_parsing() -> None:
    """transformers parses the whole file for the tokenizer, for the config and for the weights, and makes the
    table of the names of all tensors anew for each module: that is half of the time.
    """
    for function in (gguf.GGUFReader, gguf.get_tensor_name_map):
        setattr(gguf, function.__name__, cache(function))


def dtype_of(source: Path, served_as: str = "auto") -> torch.dtype:
    """The dtype of the written weights: that of the file's matrices; where these are quantised, float32 for a
    model that is served as float32, which is exact, else bfloat16, which is half as large.
    """
    types = {
        tensor.tensor_type.name for tensor in gguf.GGUFReader(str(source)).tensors if len(tensor.shape) > 1
    }
    if types <= {*PLAIN}:
        return reduce(torch.promote_types, (PLAIN[name] for name in types))
    return torch.float32 if served_as == "float32" else torch.bfloat16


def convert(source: Path, folder: Path, served_as: str = "auto") -> None:
    """Write the model. `served_as` as DTYPE."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=dtype_of(source, served_as),
        quantization_config=GgufConfig(dequantize=True),
    )
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    if model.dtype == torch.bfloat16:
        write_blocks(source, model, folder)


def main() -> None:
    die_with_parent()  # the parent holds the lock
    cache_gguf_parsing()
    convert(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])


if __name__ == "__main__":
    main()
