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
PLAIN = (bool, int, str, bytes)
"""Types of fields that are checked without a call."""
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
    """Return the message with these fields by wire name.

    Raises WireError: not a map, a field missing or of the wrong type.
    """
    message: T = map_reader(typing.cast(Any, cls))(body)
    return message


@cache
def mapper(cls: type) -> Callable[[Any], dict[str, Any]]:
    """Compile `to_map` for one class to a single expression: it runs for every token."""
    pairs = ", ".join(f"{item.metadata['wire']!r}: message.{item.name}" for item in dataclasses.fields(cls))
    compiled: Callable[[Any], dict[str, Any]] = eval(f"lambda message: {{{pairs}}}")
    return compiled


MAP_READER = """
def read(body):
    if type(body) is not dict:
        raise WireError("{cls}: not a map")
    try:
        {statements}
        {result}
    except KeyError:
        raise WireError(f"{cls}.{{field}}: missing") from None
    except (TypeError, WireError) as error:
        raise WireError(f"{cls}.{{field}}: {{error}}") from error
"""
"""Source of the function that `map_reader` compiles; each statement reads the field that it names first."""


@cache
def map_reader(cls: type) -> Callable[[Any], Any]:
    """Compile `from_map` for one class to a function without a loop: it runs for every token."""
    hints = typing.get_type_hints(cls)
    scope: dict[str, Any] = {"cls": cls, "check_type": check_type, "WireError": WireError}
    statements = []
    for item in dataclasses.fields(cls):
        name, wire, kind = item.name, repr(item.metadata["wire"]), hints[item.name]
        if kind in PLAIN:
            is_right = f"type(value := body[{wire}]) is {kind.__name__}"
            read = f"value if {is_right} else check_type(value, {kind.__name__})"
        else:
            scope[f"read_{name}"] = reader(kind)
            read = f"read_{name}(body[{wire}])"
        if item.default is not dataclasses.MISSING:
            scope[f"default_{name}"] = item.default
            read = f"({read}) if {wire} in body else default_{name}"
        elif item.default_factory is not dataclasses.MISSING:
            scope[f"default_{name}"] = item.default_factory
            read = f"({read}) if {wire} in body else default_{name}()"
        statements.append(f"field = {name!r}; {name}_ = {read}")
    result = (
        make_frozen(cls, scope)
        if typing.cast(Any, cls).__dataclass_params__.frozen
        else f"return cls({', '.join(f'{item.name}_' for item in dataclasses.fields(cls))})"
    )
    exec(MAP_READER.format(cls=cls.__name__, statements="; ".join(statements), result=result), scope)
    compiled: Callable[[Any], Any] = scope["read"]
    return compiled


def make_frozen(cls: type, scope: dict[str, Any]) -> str:
    """Source that makes a frozen message of the values read: its own `__init__` takes twice as long. `scope`
    gets the names in it.
    """
    names = [item.name for item in dataclasses.fields(cls)]
    scope |= {f"set_{name}": getattr(cls, name).__set__ for name in names} | {"new": cls.__new__}
    return "; ".join(
        ["message = new(cls)", *(f"set_{name}(message, {name}_)" for name in names), "return message"]
    )


def reader(kind: Any) -> Callable[[Any], Any]:
    """Return a function that converts a value, and raises TypeError if `kind` does not allow it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return map_reader(typing.cast(Any, kind))
    if origin is list and inner[0] in PLAIN:
        kind_of_items = inner[0]
        return lambda value: value if value == [] else check_items(value, kind_of_items)
    if origin is list:
        item = reader(inner[0])
        return lambda value: [item(element) for element in check_type(value, list)]
    if origin is tuple and set(inner) <= set(PLAIN):
        return tuple_reader(inner)
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


def tuple_reader(kinds: tuple[type, ...]) -> Callable[[Any], Any]:
    """Compile the reader of a tuple of plain values to one expression: reports have several for each row."""
    are_right = " and ".join(f"type(value[{i}]) is {kind.__name__}" for i, kind in enumerate(kinds))
    is_right = f"type(value) is list and len(value) == {len(kinds)} and {are_right}"
    source = f"lambda value: tuple(value) if {is_right} else check_all(value, kinds)"
    compiled: Callable[[Any], Any] = eval(source, {"check_all": check_all, "kinds": kinds})
    return compiled


def check_all(values: Any, kinds: tuple[type, ...]) -> Any:
    pairs = zip(check_size(values, len(kinds)), kinds, strict=True)
    return tuple(check_type(value, kind) for value, kind in pairs)


def check_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__}, not {kind.__name__}")
    return value


def check_items(values: Any, kind: type) -> Any:
    for wrong in {*map(type, check_type(values, list))} - {kind}:
        raise TypeError(f"{wrong.__name__}, not {kind.__name__}")
    return values


def check_size(value: Any, size: int) -> Any:
    if len(check_type(value, list)) != size:
        raise TypeError(f"{len(value)} items, not {size}")
    return value
