"""A GGUF file's weights: finds the quants of 4 to 8 bits in what the package gguf makes of them, by scales as
ggml-common.h of ggml lays them out, and keeps the blocks beside the plain weights of a converted file.

python -m gpu_worker.engine.quantization.gguf SOURCE.gguf FOLDER [DTYPE]

Writes the model in a GGUF file as plain weights, blocks, tokenizer and configs.
"""

import hashlib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, reduce
from itertools import accumulate
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from common.process.launch import die_with_parent
from gpu_worker.engine.quantization.blocks import Blocks
from gpu_worker.engine.quantization.checkpoint import BLOCKS_FOLDER

Array = npt.NDArray[Any]
UNPACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""Types of quants that are kept."""


def unpack(name: str, data: Array) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A tensor of the file, uint8 [rows, bytes of a row] → quants [rows, inputs]: uint8 where they have 4
    bits, else int8; scales and offsets, float32 [rows, inputs / weights of a scale]
    """
    kind = gguf.GGMLQuantizationType[name]
    blocks = np.ascontiguousarray(data).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    scales, offsets = factors(name, blocks)
    numbers = gguf.quants.dequantize(data, kind).reshape(*scales.shape, -1)
    if offsets is not None:
        numbers -= offsets[..., None]
    numbers /= np.where(scales == 0, 1, scales)[..., None]
    quants = np.rint(numbers).astype(np.uint8 if name.startswith("Q4") else np.int8)
    of_rows = (
        None if own is None else torch.from_numpy(own).reshape(len(data), -1) for own in (scales, offsets)
    )
    return torch.from_numpy(quants).reshape(len(data), -1), *of_rows  # type: ignore[return-value]


def factors(name: str, blocks: Array) -> tuple[Array, Array | None]:
    """Blocks uint8 [blocks, bytes] → scales and offsets float32 [blocks, parts]."""
    if name in ("Q4_K", "Q5_K"):
        return part_factors(blocks)
    if name == "Q6_K":
        return halves(blocks, 208) * blocks[:, 192:208].view(np.int8), None
    scales = halves(blocks, 0)
    if name == "Q4_0":
        return scales, -8 * scales
    return scales, halves(blocks, 2) if name in ("Q4_1", "Q5_1") else None


def halves(blocks: Array, at: int) -> Array:
    """The float16 number at a byte of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def part_factors(blocks: Array) -> tuple[Array, Array]:
    """Scales and offsets of the eight parts of Q4_K and Q5_K: 6 bits each, in 12 bytes."""
    packed = blocks[:, 4:16]
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 6) << 4], 1)
    offsets = np.concatenate([second & 63, (rest >> 4) | (second >> 6) << 4], 1)
    return halves(blocks, 0) * scales, -(halves(blocks, 2) * offsets)


# --- files --------------------------------------------------------------------------------------------------


def write_blocks(source: Path, model: nn.Module, folder: Path) -> None:
    """Write the blocks of the linear layers of a model that was read from the GGUF file `source`.

    A row of a layer is found in the file by its content: so it does not matter how model and file name and
    order their weights. A layer keeps its plain weights where that fails.
    """
    linears = {name: child for name, child in model.named_modules() if type(child) is nn.Linear}
    found = match_blocks(source, {name: linear.weight.detach() for name, linear in linears.items()})
    tensors = {
        f"{name}.{field}": tensor for name, blocks in found for field, tensor in blocks.tensors().items()
    }
    if tensors:
        (folder / BLOCKS_FOLDER).mkdir()
        save_file(tensors, folder / BLOCKS_FOLDER / "model.safetensors")


def match_blocks(source: Path, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Blocks]]:
    """Name and blocks of those weights [outputs, inputs], all of one dtype, that the file has in blocks."""
    dtype = next((weight.dtype for weight in weights.values()), torch.bfloat16)
    tensors = [
        tensor
        for tensor in gguf.GGUFReader(str(source)).tensors
        if tensor.tensor_type.name in UNPACKED and len(tensor.shape) == 2
    ]
    places = {
        digest: (number, row)
        for number, tensor in enumerate(tensors)
        for row, digest in enumerate(digests(blocks_of(tensor).widen(dtype)))
    }
    for name, weight in weights.items():
        found = [place for digest in digests(weight) if (place := places.get(digest))]
        if len(found) == len(weight) and (blocks := collect_rows(tensors, found)):
            yield name, blocks


def digests(weight: torch.Tensor) -> list[bytes]:
    """A digest of each row of weights [outputs, inputs]; both zeros are the same number."""
    rows = (weight + 0).view(torch.uint8).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def collect_rows(tensors: Sequence[gguf.ReaderTensor], places: Sequence[tuple[int, int]]) -> Blocks | None:
    """Rows, each by its tensor's number and its own in there, as the rows of one layer's blocks."""
    numbers = sorted({number for number, _ in places})
    parts = [blocks_of(tensors[number]) for number in numbers]
    firsts = accumulate((len(part.quants) for part in parts), initial=0)
    starts = dict(zip(numbers, firsts, strict=False))
    rows = torch.tensor([starts[number] + row for number, row in places])
    return Blocks.joined(parts, rows) if parts else None


def blocks_of(tensor: gguf.ReaderTensor) -> Blocks:
    """A matrix in a GGUF file, of a type in UNPACKED. Scales are float16 where these are the same numbers."""
    return Blocks(*unpack(tensor.tensor_type.name, tensor.data)).halved()


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
