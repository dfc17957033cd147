"""Blocks of a GGUF file's weights, which a converted file has beside the plain weights.

Tensors of the file are uint8 [outputs, bytes of a row].
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import gguf
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from gpu_worker.engine.blocks import Blocks, ReadBlocks
from gpu_worker.engine.model.gguf_types import UNPACK, unpack

BLOCKS_FILE = Path("blocks") / "model.safetensors"
"""In the directory of a converted model; where no checkpoint's weights are looked for."""


# --- files --------------------------------------------------------------------------------------------------


def write_blocks(source: Path, model: nn.Module, folder: Path) -> None:
    """Write the blocks of the linear layers of a bfloat16 model that was read from the GGUF file `source`.

    A row of a layer is found in the file by its content: so it does not matter how model and file name and
    order their weights. A layer keeps its plain weights where that fails.
    """
    linears = {name: child for name, child in model.named_modules() if type(child) is nn.Linear}
    found = find_blocks(source, {name: linear.weight.detach() for name, linear in linears.items()})
    tensors = {
        f"{name}.{field}": tensor for name, blocks in found for field, tensor in blocks.tensors().items()
    }
    if tensors:
        path = folder / BLOCKS_FILE
        path.parent.mkdir()
        save_file(tensors, path)


def converted_blocks(folder: Path) -> Mapping[str, Blocks]:
    """Blocks by the name of their linear layer, each read when it is asked for; none for a model that was no
    GGUF file with such weights.
    """
    path, fields = folder / BLOCKS_FILE, dict[str, list[str]]()
    if path.exists():
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                layer, _, field = name.rpartition(".")
                fields.setdefault(layer, []).append(field)

    def read(layer: str) -> Blocks:
        with safe_open(path, "pt") as file:
            tensors = {field: file.get_tensor(f"{layer}.{field}") for field in fields[layer]}
        return Blocks.of_tensors(tensors)

    return ReadBlocks(list(fields), read)


def find_blocks(source: Path, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Blocks]]:
    """Name and blocks of those weights, bfloat16 [outputs, inputs], that the file has in blocks."""
    tensors = [
        tensor
        for tensor in gguf.GGUFReader(str(source)).tensors
        if tensor.tensor_type.name in UNPACK and len(tensor.shape) == 2
    ]
    places = {
        digest: (number, row)
        for number, tensor in enumerate(tensors)
        for row, digest in enumerate(digests(blocks_of(tensor).widen()))
    }
    for name, weight in weights.items():
        found = [place for digest in digests(weight) if (place := places.get(digest))]
        if len(found) == len(weight) and (blocks := collect_rows(tensors, found)):
            yield name, blocks


def digests(weight: torch.Tensor) -> list[bytes]:
    """A digest of each row of weights, bfloat16 [outputs, inputs]; both zeros are the same number."""
    rows = (weight + 0).view(torch.int16).numpy()
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
    """A matrix in a GGUF file, of a type in UNPACK. Scales are float16 where these are the same numbers."""
    return Blocks(*unpack(tensor.tensor_type.name, tensor.data)).halved()
