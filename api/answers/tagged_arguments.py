"""Tagged calls: calls whose arguments are texts between tags, Qwen3-Coder's and GLM's.

A value is written as JSON of the type that the schema gives its parameter.
"""

import json
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

from api.answers.json_text import read_value
from api.answers.python_calls import literal_to_json
from api.answers.scanner import MAX_NAME, Scanner, Waiting

TOOL_CALL = "<tool_call>"
END_TOOL_CALL = "</tool_call>"
FUNCTION = "<function="
END_FUNCTION = "</function>"
JSON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
MAX_REFERENCES = 8
"""How many references of a schema are followed."""


class ArgumentTags(NamedTuple):
    """What stands around the name of an argument and its value.

    Attributes:
        name_end: follows the name.
        value: follows `name_end`, after white space; "" if the value follows at once.
        line: what else divides tags and value, where the model writes it.
        untyped: the types of a parameter for which the schema says none.
    """

    name: str
    name_end: str
    value: str
    end: str
    line: str = ""
    untyped: frozenset[str] = frozenset()


PARAMETER = ArgumentTags("<parameter=", ">", "", "</parameter>", "\n", frozenset(["string"]))
PAIR = ArgumentTags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def read_function(scanner: Scanner, mark: str) -> Waiting:
    """Read Qwen3-Coder's function. The model may leave the marks around it out."""
    if mark != FUNCTION and not (yield from scanner.literal(FUNCTION)):
        return False
    return (yield from read_tagged_call(scanner, ">", PARAMETER, END_FUNCTION))


def read_glm(scanner: Scanner, mark: str) -> Waiting:
    return read_tagged_call(scanner, "", PAIR, END_TOOL_CALL)


def read_tagged_call(scanner: Scanner, name_end: str, tags: ArgumentTags, end: str) -> Waiting:
    """Read a name and the mark after it, tagged arguments, and the mark after these."""
    name = yield from scanner.name()
    if not name or not (yield from scanner.literal(name_end)):
        return False
    yield from scanner.skip()
    if not (yield from scanner.next_is(tags.name, end)):
        return False
    scanner.start_call(name)
    parameters = next((tool.parameters for tool in scanner.tools if tool.name == name), {})
    before = "{"
    awaited: tuple[str, ...] = (tags.name, end)
    while (yield from scanner.literal(tags.name)):
        key = yield from scanner.until(tags.name_end, MAX_NAME)
        if key is None:
            if scanner.ended and len(scanner.text) - scanner.position <= MAX_NAME:
                return False
            break
        if tags.value:
            yield from scanner.skip()
        if not (yield from scanner.literal(tags.value)):
            awaited = (tags.value,)
            break
        yield from scanner.literal(tags.line)
        scanner.add_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        types = property_types(parameters, key) or tags.untyped
        if not (yield from read_typed(scanner, types, tags.line + tags.end, tags.end)):
            return False
        yield from scanner.skip()
    found = yield from scanner.literal(end)
    rest = scanner.text[scanner.position :]
    if found or not scanner.ended or not any(mark.startswith(rest) for mark in awaited):
        scanner.add_arguments("{}" if before == "{" else "}")  # else the text ends before the mark
    return found


# --- values -------------------------------------------------------------------------------------------------


def read_typed(scanner: Scanner, types: frozenset[str], *marks: str) -> Generator[None, None, str]:
    """Read a value up to one of the marks, and add it to the arguments of the call. A text is passed on as it
    comes, other values when they are whole. A mark within a JSON string does not end the value.
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
    value = literal_to_json(text)
    if value is not None and (not types or is_of(json.loads(value), types)):
        return value
    return json.dumps(text, ensure_ascii=False)


def is_of(value: Any, types: frozenset[str]) -> bool:
    name = JSON_TYPES[type(value)]
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
        return types_of(resolve_reference(path, root), root, depth + 1)
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(JSON_TYPES[type(value)] for value in values if type(value) in JSON_TYPES)
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or ()]
    found = [types_of(part, root, depth + 1) for part in parts]
    return frozenset().union(*found) if all(found) else frozenset()


def resolve_reference(path: str, root: Mapping[str, Any]) -> Any:
    """The schema at a reference `#/…` inside of the parameters."""
    value: Any = root
    for key in path.removeprefix("#").split("/")[1:]:
        value = value.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
    return value
