"""Codec: dataclasses to msgpack maps and back.

Fields have short stable names. A message has a version; unknown fields are ignored, wrong types refused.
"""

import dataclasses
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgpack

VERSION = 1
T = TypeVar("T")


class WireError(ValueError):
    """The bytes are not a valid message of the expected type; `str()` names the field."""


def wire_field(
    name: str, default: Any = dataclasses.MISSING, default_factory: Any = dataclasses.MISSING
) -> Any:
    """Declare a field with the short `name` on the wire."""
    defaults = {} if default is dataclasses.MISSING else {"default": default}
    defaults |= {} if default_factory is dataclasses.MISSING else {"default_factory": default_factory}
    return dataclasses.field(metadata={"wire": name}, **defaults)


def encode(message: Any) -> bytes:
    data: bytes = PACKER.pack({"v": VERSION, **to_map(message)})
    return data


def decode(cls: type[T], data: bytes) -> T:
    """Return the message.

    Raises WireError: not msgpack, another version, a field missing or of the wrong type.
    """
    return from_map(cls, unpack(cls, data))


def unpack(cls: type[Any], data: bytes) -> dict[str, Any]:
    """Return the fields of a message by wire name, which `from_map` reads.

    Raises WireError: not msgpack, another version.
    """
    try:
        body = msgpack.unpackb(data)
    except Exception as error:  # msgpack raises its own types, ValueError, UnicodeDecodeError and more
        raise WireError(f"{cls.__name__}: not msgpack: {error}") from error
    if not isinstance(body, dict):
        raise WireError(f"{cls.__name__}: not a map")
    if body.get("v") != VERSION:
        raise WireError(f"{cls.__name__}: version {body.get('v')!r}, not {VERSION}")
    return body


def to_map(message: Any) -> dict[str, Any]:
    """Return the fields of a message by wire name; nested messages stay as they are."""
    return mapper(typing.cast(Any, type(message)))(message)


PACKER = msgpack.Packer(default=to_map)
"""Shared by all messages of a process: making a packer takes longer than packing a message.

One thread encodes all messages.
"""


def from_map(cls: type[T], body: Any) -> T:
    if not isinstance(body, dict):
        raise WireError(f"{cls.__name__}: not a map")
    values = {}
    for name, short, read, required in readers(typing.cast(Any, cls)):
        if short in body:
            try:
                values[name] = read(body[short])
            except (TypeError, WireError) as error:
                raise WireError(f"{cls.__name__}.{name}: {error}") from error
        elif required:
            raise WireError(f"{cls.__name__}.{name}: missing")
    return cls(**values)


@cache
def mapper(cls: type) -> Callable[[Any], dict[str, Any]]:
    """Compile `to_map` for one class to a single expression: it runs for every token."""
    pairs = ", ".join(f"{item.metadata['wire']!r}: message.{item.name}" for item in dataclasses.fields(cls))
    compiled: Callable[[Any], dict[str, Any]] = eval(f"lambda message: {{{pairs}}}")
    return compiled


@cache
def readers(cls: type) -> list[tuple[str, str, Callable[[Any], Any], bool]]:
    """(name, wire name, reader, whether it is required) of each field."""
    hints = typing.get_type_hints(cls)
    absent = dataclasses.MISSING
    return [
        (
            item.name,
            item.metadata["wire"],
            reader(hints[item.name]),
            item.default is absent and item.default_factory is absent,
        )
        for item in dataclasses.fields(cls)
    ]


def reader(kind: Any) -> Callable[[Any], Any]:
    """Return a function that converts a value, and raises TypeError if `kind` does not allow it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return lambda value: from_map(typing.cast(Any, kind), value)
    if origin is list:
        item = reader(inner[0])
        return lambda value: [item(element) for element in check_type(value, list)]
    if origin is tuple:
        parts = [reader(part) for part in inner]
        return lambda value: tuple(
            part(element) for part, element in zip(parts, check_size(value, len(parts)), strict=True)
        )
    if origin in (typing.Union, types.UnionType):
        some = reader(next(part for part in inner if part is not type(None)))
        return lambda value: None if value is None else some(value)
    if kind is float:
        return lambda value: float(
            check_type(value, int) if isinstance(value, int) else check_type(value, float)
        )
    return lambda value: check_type(value, kind)


def check_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__}, not {kind.__name__}")
    return value


def check_size(value: Any, size: int) -> Any:
    if len(check_type(value, list)) != size:
        raise TypeError(f"{len(value)} items, not {size}")
    return value
