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

from common.process.parent_death import die_with_parent
from gpu_worker.engine.quantization.gguf_blocks import write_blocks

SPARE_WEIGHTS = 1.05
"""A model has no more weights than its file, but for some that are computed."""
SHOWN = 200
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


class NotConvertible(Exception):
    """A file whose header is possible, and which is none of a whole model all the same."""


def check_size(source: Path) -> None:
    """Raises NotConvertible where the keys describe a larger model than the file has weights for: it would
    take memory without an end.
    """
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    described = sum(weight.numel() for weight in model.parameters())
    there = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(str(source)).tensors)
    if described > SPARE_WEIGHTS * there:
        raise NotConvertible(f"its keys describe a model of {described} weights, and it has {there}")


def check_loaded(found: Mapping[str, Collection[Any]]) -> None:
    """Raises NotConvertible where a weight is not in the file as it should be: transformers makes it up."""
    for name in sorted(found["missing_keys"]):
        raise NotConvertible(f"it has no weights for {name}")
    for name, there, wanted in sorted(found["mismatched_keys"]):
        raise NotConvertible(f"it has {list(there)} weights for {name}, and its keys ask for {list(wanted)}")


def convert(source: Path, folder: Path, served_as: str = "auto") -> None:
    """Write the model. `served_as` as DTYPE."""
    check_size(source)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=dtype_of(source, served_as),
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are told, and refused below
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
    except Exception as error:  # of what transformers does not expect, it says anything
        cause = " ".join(str(error).split())[:SHOWN]
        sys.exit(f"transformers does not read it ({type(error).__name__}: {cause})")


if __name__ == "__main__":
    main()
