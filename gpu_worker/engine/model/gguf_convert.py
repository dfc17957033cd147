"""python -m gpu_worker.engine.model.gguf_convert SOURCE.gguf FOLDER [DTYPE]

Writes the model in a GGUF file as plain weights, blocks, tokenizer and configs.
"""

import sys
from collections.abc import Collection, Mapping
from functools import cache, reduce
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from common.process.launch import die_with_parent
from gpu_worker.engine.quantization.gguf_blocks import write_blocks

SPARE_WEIGHTS = 1.05
"""A model may have this many times as many weights as its file: some are computed."""
MAX_CAUSE = 200
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def cache_gguf_parsing() -> None:
    """Make transformers parse the file once. By itself it parses it for the tokenizer, the config and the
    weights, and builds the table of tensor names for each module: half of the time.
    """
    for function in (gguf.GGUFReader, gguf.get_tensor_name_map):
        setattr(gguf, function.__name__, cache(function))


def dtype_of(source: Path, served_as: str = "auto") -> torch.dtype:
    """The dtype of the written weights: that of the file's matrices. If these are quantised: float32, which
    is exact, for a model that is served as float32, else bfloat16, which is half as large.
    """
    types = {
        tensor.tensor_type.name for tensor in gguf.GGUFReader(str(source)).tensors if len(tensor.shape) > 1
    }
    if types <= {*PLAIN_DTYPES}:
        return reduce(torch.promote_types, (PLAIN_DTYPES[name] for name in types))
    return torch.float32 if served_as == "float32" else torch.bfloat16


class NotConvertible(Exception):
    """The file has a valid header, but not the weights of a whole model."""


def check_size(source: Path) -> None:
    """Raises NotConvertible if the keys describe a larger model than the file has weights for: it could take
    any amount of memory.
    """
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    described = sum(weight.numel() for weight in model.parameters())
    there = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(str(source)).tensors)
    if described > SPARE_WEIGHTS * there:
        raise NotConvertible(f"its keys describe a model of {described} weights, and it has {there}")


def check_loaded(found: Mapping[str, Collection[Any]]) -> None:
    """Raises NotConvertible if a weight is missing or misshapen: transformers makes up random ones."""
    for name in sorted(found["missing_keys"]):
        raise NotConvertible(f"it has no weights for {name}")
    for name, there, wanted in sorted(found["mismatched_keys"]):
        raise NotConvertible(f"it has {list(there)} weights for {name}, and its keys ask for {list(wanted)}")


def convert(source: Path, folder: Path, served_as: str = "auto") -> None:
    """Write the model in `source` to `folder`. `served_as`: as the setting DTYPE."""
    check_size(source)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=dtype_of(source, served_as),
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # `check_loaded` refuses them
    )
    model, found = loaded
    check_loaded(found)
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    if model.dtype == torch.bfloat16:
        write_blocks(source, model, folder)


def main() -> None:
    die_with_parent()  # the parent holds the lock
    cache_gguf_parsing()
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    except NotConvertible as error:
        sys.exit(str(error))
    except Exception as error:  # transformers may raise anything for a file that it does not expect
        cause = " ".join(str(error).split())[:MAX_CAUSE]
        sys.exit(f"transformers does not read it ({type(error).__name__}: {cause})")


if __name__ == "__main__":
    main()
