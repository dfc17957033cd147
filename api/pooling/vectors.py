"""Vectors: float32 values of finished streams, cut, normalised and compared."""

import math
from array import array
from base64 import b64encode
from collections.abc import Sequence

from api.streams.stream import Stream

Vector = Sequence[float]


def values_of(stream: Stream) -> "array[float]":
    """All values that a stream has, little-endian float32 on the wire."""
    values = array("f")
    values.frombytes(stream.logits or b"")
    return values


def shaped(vector: Vector, dimensions: int, normalized: bool) -> "array[float]":
    """The first `dimensions` values of a vector, 0 for all, and of length 1 if it is to be `normalized`."""
    kept = vector[:dimensions] if dimensions else vector
    length = length_of(kept) if normalized else 1.0
    return array("f", kept) if length in (0.0, 1.0) else array("f", [value / length for value in kept])


def length_of(vector: Vector) -> float:
    return math.sqrt(math.fsum(value * value for value in vector))


def cosine(one: Vector, other: Vector) -> float:
    lengths = length_of(one) * length_of(other)
    return math.fsum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0


def to_base64(vector: "array[float]") -> str:
    return b64encode(vector.tobytes()).decode()


def sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
