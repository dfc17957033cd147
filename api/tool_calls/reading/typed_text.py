"""Write the values of formats without types as JSON, by the schema of the parameter."""

import json
from collections.abc import Callable, Generator, Mapping
from typing import Any

from api.tool_calls.reading.json_text import read_value
from api.tool_calls.reading.python_text import as_json
from api.tool_calls.reading.scanner import Scanner

TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
MAX_REFERENCES = 8


def read_typed(scanner: Scanner, types: frozenset[str], *marks: str) -> Generator[None, None, str]:
    """Read a value up to one of the marks, and add it to the arguments of a call. A text is passed on as it
    comes, others when they are whole. A mark inside of a JSON string does not end it.
    """
    if types == {"string"}:
        scanner.add_arguments('"')
        mark = yield from scanner.pass_until(escaping(scanner.add_arguments), *marks)
        if mark:
            scanner.add_arguments('"')
        return mark
    start = scanner.position
    pieces: list[str] = []
    yield from scanner.skip()
    is_json = yield from read_value(scanner, pieces.append)
    yield from scanner.skip()
    if not is_json or not (yield from scanner.next_is(*marks)):
        scanner.position = start
        pieces.clear()
    mark = yield from scanner.pass_until(pieces.append, *marks)
    if mark:
        scanner.add_arguments(typed("".join(pieces), types))
    return mark


def escaping(write: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: write(json.dumps(text, ensure_ascii=False)[1:-1])


def typed(text: str, types: frozenset[str]) -> str:
    """A value of one of these types as JSON; a text where it is none of them."""
    value = as_json(text)
    if value is not None and (not types or matches(json.loads(value), types)):
        return value
    return json.dumps(text, ensure_ascii=False)


def matches(value: Any, types: frozenset[str]) -> bool:
    name = TYPES[type(value)]
    return name in types or (name == "integer" and "number" in types)


def property_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """The types that a schema allows for a property; none if it does not say."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return types_of(schema, parameters)


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return frozenset()
    if isinstance(kind := schema.get("type"), str | list):
        return frozenset([kind] if isinstance(kind, str) else [one for one in kind if isinstance(one, str)])
    if isinstance(path := schema.get("$ref"), str):
        return types_of(referred(path, root), root, depth + 1)
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(TYPES[type(value)] for value in values if type(value) in TYPES)
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or ()]
    found = [types_of(part, root, depth + 1) for part in parts]
    return frozenset().union(*found) if all(found) else frozenset()


def referred(path: str, root: Mapping[str, Any]) -> Any:
    """The schema at a reference `#/…` inside of the parameters."""
    value: Any = root
    for key in path.removeprefix("#").split("/")[1:]:
        value = value.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
    return value
