"""GGUF header: the keys and tensors that a GGUF file says it has, as far as the file can have them. Each
number is checked against the file's size before it is believed, so a damaged file is refused at once.

The layout is that of ggml's docs/gguf.md. Strings and arrays begin with their length.
"""

import math
import mmap
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn, TypeGuard

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


class Damaged(Exception):
    """What of a GGUF file cannot be true."""


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
    """Reads one thing after the other, none beyond the end of the file.

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
            self.refuse(f"ends behind the file's end ({len(self.data)} bytes)")
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
