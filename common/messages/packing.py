"""Packing: lists of numbers to bytes and back, as little-endian int32 and float32."""

import struct
from array import array
from collections.abc import Sequence
from sys import byteorder
from typing import Any

from common.messages.codec import WireError

if byteorder != "little":
    raise ImportError("token ids travel as little-endian int32; this machine is big-endian")


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Token ids of `pack_ids`. Raises WireError when the length is no multiple of four bytes."""
    return unpack("i", data)


def pack_floats(values: Sequence[float]) -> bytes:
    """Log-probabilities as little-endian float32."""
    return array("f", values).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """Values of `pack_floats`. Raises WireError when the length is no multiple of four bytes."""
    return unpack("f", data)


def unpack(code: str, data: bytes) -> list[Any]:
    if len(data) == 4:  # the common case: the one token of a step
        return [*struct.unpack(code, data)]
    if len(data) % 4:
        raise WireError(f"{len(data)} bytes are no multiple of 4")
    values = array(code)
    values.frombytes(data)
    return values.tolist()
