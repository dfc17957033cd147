"""Codec: dataclasses to msgpack maps and back.

Fields have short stable names. A message has a version; unknown fields are ignored, wrong types refused: by
pydantic's core, which makes a message in one call, since that runs for every token.
"""

import contextlib
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgpack
from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

VERSION = 1
PLAIN: dict[Any, CoreSchema] = {
    bool: core_schema.bool_schema(strict=True),
    int: core_schema.int_schema(strict=True),
    float: core_schema.float_schema(strict=True),
    str: core_schema.str_schema(strict=True),
    bytes: core_schema.bytes_schema(strict=True),
}
NAMED = core_schema.CoreConfig(loc_by_alias=False)
"""Errors say the names of fields, not those on the wire."""
T = TypeVar("T")


class WireError(ValueError):
    """The bytes are not a valid message of the expected type; `str()` names the field."""


def wire_field(name: str, **default: Any) -> Any:
    """Declare a field with the short `name` on the wire, and perhaps its `default` or `default_factory`."""
    return dataclasses.field(metadata={"wire": name}, **default)


def encode(message: Any) -> bytes:
    data: bytes = PACKER.pack({"v": VERSION, **to_map(message)})
    return data


def to_map(message: Any) -> dict[str, Any]:
    """Return the fields of a message by wire name; nested messages stay as they are."""
    names, values = wire_names(typing.cast(Any, type(message)))
    return dict(zip(names, values(message), strict=False))


@cache
def wire_names(cls: Any) -> tuple[list[str], Callable[[Any], tuple[Any, ...]]]:
    """Return the names on the wire of a message's fields, and what reads their values: the last one twice,
    since `attrgetter` gives no tuple for one name alone.
    """
    fields = dataclasses.fields(cls)
    names = [one.name for one in fields]
    return [one.metadata["wire"] for one in fields], attrgetter(*names, names[-1])


PACKER = msgpack.Packer(default=to_map)
"""Shared by all messages of a process: making a packer takes longer than packing a message.

One thread encodes all messages.
"""


def decode(cls: type[T], data: bytes) -> T:
    """Return the message.

    Raises WireError: not msgpack, another version, a field missing or of the wrong type.
    """
    return from_map(cls, unpack(cls, data))


def decode_fields(cls: type[T], fields: Mapping[bytes, bytes]) -> dict[str, T]:
    """Return the messages in the fields of a hash in Redis, by name. Others are left out: another program, or
    a later release, wrote to them.
    """
    found = {}
    for name, data in fields.items():
        with contextlib.suppress(WireError, UnicodeDecodeError):
            found[name.decode()] = decode(cls, data)
    return found


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


def from_map(cls: type[T], body: Any) -> T:
    """Return the message with these fields by wire name.

    Raises WireError: not a map, a field missing or of the wrong type.
    """
    try:
        message: T = validator(typing.cast(Any, cls)).validate_python(body)
    except ValidationError as errors:
        error = errors.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, (cls.__name__, *error["loc"])))
        raise WireError(f"{place}: {error['msg']}") from errors
    return message


@cache
def validator(cls: Any) -> SchemaValidator:
    return SchemaValidator(schema_of(cls))


def schema_of(kind: Any) -> CoreSchema:
    """Return what a field of this type, or a message of this class, may be."""
    if kind in PLAIN:
        return PLAIN[kind]
    if dataclasses.is_dataclass(kind):
        return schema_of_message(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return core_schema.list_schema(schema_of(inner[0]), strict=True)
    if origin is tuple:  # a list on the wire
        return core_schema.tuple_schema([*map(schema_of, inner)])
    if origin not in (typing.Union, types.UnionType):
        raise TypeError(f"no field of a message is of type {kind}")
    [some] = (part for part in inner if part is not types.NoneType)
    return core_schema.nullable_schema(schema_of(some))


def schema_of_message(cls: Any) -> CoreSchema:
    hints = typing.get_type_hints(cls)
    fields = []
    for one in dataclasses.fields(cls):
        schema, wire = schema_of(hints[one.name]), one.metadata["wire"]
        defaults: Any = {"default": one.default, "default_factory": one.default_factory}
        if given := {name: value for name, value in defaults.items() if value is not dataclasses.MISSING}:
            schema = core_schema.with_default_schema(schema, **given)
        fields.append(core_schema.dataclass_field(one.name, schema, validation_alias=wire))
    names = [one.name for one in dataclasses.fields(cls)]
    arguments = core_schema.dataclass_args_schema(cls.__name__, fields)
    return core_schema.dataclass_schema(cls, arguments, names, slots=True, config=NAMED)
