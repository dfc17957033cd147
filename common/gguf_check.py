"""GGUF header: the keys and tensors that a GGUF file says it has, and the refusal of a damaged file.

Each number is checked against the file's size before it is used, and the keys against the tensors, so a
damaged file is refused at once. The layout is that of ggml's docs/gguf.md. Strings and arrays begin with
their length.
"""

import math
import mmap
import re
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from common.settings.settings import SettingError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
"""Kinds of values, by their numbers in the file → by their letters in `struct`."""
FLOATS, STRING, ARRAY = (6, 12), 8, 9
SMALLEST_KEY, SMALLEST_TENSOR = 13, 24
"""Bytes of a key with its value, and of a tensor's entry, at least."""
MAX_KEY_BYTES = 2**16 - 1
MAX_ELEMENTS = 2**22
"""Of all arrays together; the largest vocabularies have a third of it."""
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
BLOCK = re.compile(r"(?:^|\.)blk\.(\d{1,9})\.")
TOKENIZER, TOKENS, MERGES = (f"tokenizer.ggml.{name}" for name in ("model", "tokens", "merges"))
EMBEDDING = "token_embd.weight"


class Damaged(Exception):
    """Something that a GGUF file says cannot be true."""


@dataclass(frozen=True, slots=True)
class ArrayOf:
    """An array of a key, without its elements."""

    kind: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the header describes it; `offset` counts from the begin of all tensors' data."""

    name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(slots=True)
class Header:
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)


class HeaderReader:
    """Reads one value after the other, none beyond the end of the file.

    Attributes:
        what: which of the file's parts is being read, in words.
        num_elements: of arrays, so far.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0
        self.order = "<"
        self.what = "its head"
        self.num_elements = 0

    def refuse(self, problem: str) -> NoReturn:
        raise Damaged(f"{self.what} {problem}")

    def read_bytes(self, num_bytes: int) -> bytes:
        if num_bytes > len(self.data) - self.at:
            self.refuse(f"ends after the file's end ({len(self.data)} bytes)")
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def number(self, letter: str) -> Any:
        return struct.unpack(self.order + letter, self.read_bytes(struct.calcsize(letter)))[0]

    def count(self, what: str, size: int) -> int:
        """A number of things that take at least `size` bytes each."""
        found: int = self.number("Q")
        if found * size > len(self.data) - self.at:
            self.refuse(f"has {found} {what}, more than the file has room for")
        return found

    def text(self) -> str:
        encoded = self.read_bytes(self.count("bytes", 1))
        try:
            return encoded.decode()
        except UnicodeDecodeError as error:
            self.refuse(f"is no UTF-8: {encoded[max(0, error.start - 10) : error.start + 10]!r}")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            self.refuse(f"is of kind {kind}, which there is not")
        found = self.number(SCALARS[kind])
        if kind in FLOATS and not math.isfinite(found):
            self.refuse(f"is {found}")
        return found

    def array(self) -> ArrayOf:
        kind = self.number("I")
        if kind != STRING and kind not in SCALARS:
            self.refuse(f"is an array of kind {kind}, which is not read here")
        size = 8 if kind == STRING else struct.calcsize(SCALARS[kind])
        length = self.count("elements", size)
        self.num_elements += length
        if self.num_elements > MAX_ELEMENTS:
            self.refuse(f"has {length} elements, and all arrays more than {MAX_ELEMENTS}")
        if kind == STRING:
            for _ in range(length):
                self.text()
        else:
            self.read_bytes(length * size)
        return ArrayOf(kind, length)


def read_header(data: mmap.mmap) -> Header:
    """Raises Damaged."""
    reader, header = HeaderReader(data), Header()
    if reader.read_bytes(4) != MAGIC:
        raise Damaged(f"it begins with {data[:4]!r}, not {MAGIC!r}")
    version = reader.number("I")
    if version & 0xFFFF == 0:
        reader.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in VERSIONS:
        raise Damaged(f"its version is {version}; those read are {', '.join(map(str, VERSIONS))}")
    num_tensors, num_keys = reader.count("tensors", SMALLEST_TENSOR), reader.count("keys", SMALLEST_KEY)
    for number in range(num_keys):
        reader.what = f"the name of key {number + 1} of {num_keys}"
        key = reader.text()
        if not 1 <= len(key.encode()) <= MAX_KEY_BYTES or key in header.values:
            reader.refuse(f"is empty, too long, or there twice: {key!r:.60}")
        reader.what = f"`{key:.60}`"
        header.values[key] = reader.value(reader.number("I"))
    for number in range(num_tensors):
        reader.what = f"the entry of tensor {number + 1} of {num_tensors}"
        tensor = read_tensor(reader)
        if header.tensors.setdefault(tensor.name, tensor) is not tensor:
            reader.refuse("is there twice")
    check_places(header, reader.at, len(data))
    return header


def read_tensor(reader: HeaderReader) -> TensorEntry:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = reader.text()
    reader.what = f"the tensor `{name:.60}`"
    num_dimensions = reader.number("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        reader.refuse(f"has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible")
    shape = tuple(reader.number("Q") for _ in range(num_dimensions))
    kind = reader.number("I")
    if kind not in {*GGMLQuantizationType}:
        reader.refuse(f"is of type {kind}, which is not known here")
    width, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if 0 in shape or shape[0] % width:
        reader.refuse(f"has the shape {list(shape)}; its type has {width} weights in a block")
    return TensorEntry(name, shape, reader.number("Q"), math.prod(shape) // width * num_bytes)


def check_places(header: Header, end_of_header: int, file_bytes: int) -> None:
    """Check that each tensor has a place of its own in the file. Raises Damaged."""
    alignment = header.values.get("general.alignment", DEFAULT_ALIGNMENT)
    if not is_count(alignment, file_bytes) or alignment & (alignment - 1):
        raise Damaged(f"`general.alignment` is {alignment!r}, which is no power of two")
    begin = -(-end_of_header // alignment) * alignment
    places = sorted(header.tensors.values(), key=lambda tensor: tensor.offset)
    for tensor in places:
        if tensor.offset % alignment:
            raise Damaged(f"the tensor `{tensor.name:.60}` is at byte {tensor.offset}, between two places")
        if begin + tensor.offset + tensor.num_bytes > file_bytes:
            end = begin + tensor.offset + tensor.num_bytes
            raise Damaged(f"the tensor `{tensor.name:.60}` ends at byte {end} of a file of {file_bytes}")
    for one, other in pairwise(places):
        if one.offset + one.num_bytes > other.offset:
            raise Damaged(f"the tensors `{one.name:.60}` and `{other.name:.60}` overlap")


def is_count(value: Any, most: int) -> TypeGuard[int]:
    return type(value) is int and 1 <= value <= most


def check_gguf(path: Path) -> int:
    """Check that the header of a GGUF file is one that the file can have, and return how many weights its
    tensors have. Raises SettingError.
    """
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise Damaged("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = read_header(data)
                check_values(header)
                return sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    except Damaged as damage:
        raise SettingError("model_id", f"{path} is damaged, or no GGUF file: {damage}") from damage


def check_values(header: Header) -> None:
    """Check the keys that say how large the model is against its tensors. Raises Damaged."""
    family = header.values.get("general.architecture")
    if not isinstance(family, str):
        raise Damaged("it has no `general.architecture`")
    if is_count(parts := header.values.get("split.count"), 2**16) and parts > 1:
        raise Damaged(f"it is one of {parts} parts, which `llama-gguf-split --merge` joins")
    blocks = {int(found[1]) for name in header.tensors if (found := BLOCK.search(name))}
    count = header.values.get(key := f"{family}.block_count")
    if not is_count(count, len(blocks)) or blocks != {*range(count)}:
        raise Damaged(f"`{key}` is {count!r}, but it has tensors of {len(blocks)} blocks")
    check_vocabulary(family, header)


def check_vocabulary(family: str, header: Header) -> None:
    """Check that keys and tensors agree on the number of tokens. Raises Damaged."""
    tokens, embedding = header.values.get(TOKENS), header.tensors.get(EMBEDDING)
    if not is_texts(tokens) or not isinstance(header.values.get(TOKENIZER), str) or embedding is None:
        raise Damaged(f"it has no `{TOKENIZER}`, no `{TOKENS}`, or no tensor `{EMBEDDING}`")
    if not is_texts(header.values.get(MERGES, tokens)):
        raise Damaged(f"`{MERGES}` is no array of texts")
    expected = (header.values.get(f"{family}.embedding_length"), tokens.length)
    if embedding.shape != expected:
        width = f"`{family}.embedding_length` is {expected[0]!r}, and `{TOKENS}` has {tokens.length} elements"
        raise Damaged(f"{width}, but `{EMBEDDING}` has the shape {list(embedding.shape)}")
    if (size := header.values.get(f"{family}.vocab_size", tokens.length)) != tokens.length:
        raise Damaged(f"`{family}.vocab_size` is {size!r}, but `{TOKENS}` has {tokens.length} elements")


def is_texts(value: Any) -> TypeGuard[ArrayOf]:
    return isinstance(value, ArrayOf) and value.kind == STRING
