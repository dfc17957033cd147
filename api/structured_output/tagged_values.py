"""Objects whose values are written one by one between tags, as Qwen3-Coder's and GLM's calls are, in Lark."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from api.errors import ApiError
from api.structured_output.lark import Lark, literal, one_of
from api.tool_calls.formats.tagged import PAIR, PARAMETER, ArgumentTags
from api.tool_calls.reading.typed_text import types_of

Refuse = Callable[[str], ApiError]
"""The error for a keyword that values between tags cannot be held to."""
WHOLE = (
    *("anyOf", "oneOf", "allOf", "not", "if", "$ref", "enum", "const", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
)
"""Keywords that say something of an object as a whole."""
OF_TEXTS = ("pattern", "format", "minLength", "maxLength")
DEFINITIONS = ("$defs", "definitions")
ANY_NAME = "/[a-zA-Z_][a-zA-Z0-9_]*/"
SPACE = r"(/[ \n\t]{1,33}/)?"
STYLES = {
    "qwen_xml": PARAMETER,
    "minimax_xml": ArgumentTags('<parameter name="', ('">',), "", PARAMETER.end),
    "deepseek_xml": ArgumentTags(
        '<｜DSML｜parameter name="', ('" string="true">', '" string="false">'), "", "</｜DSML｜parameter>"
    ),
    "glm_xml": PAIR,
}
"""By xgrammar's names of styles."""


def tagged_object(lark: Lark, tags: ArgumentTags, schema: Mapping[str, Any], refuse: Refuse) -> str:
    """All properties in the order of the schema; those that are not required may be missing. An object of
    which the schema names no property may have any. White space is free between tags, and around JSON.
    """
    found = list(properties_of(schema, refuse))
    if not found and schema.get("additionalProperties") is not False:
        name = f"{lark.marked(tags.name)} {lark.lexeme(ANY_NAME)}"
        return f"({SPACE} {name} {before_value(lark, tags)} {lark.until(tags.end)})* {SPACE}"
    parts = []
    for name, part, is_required in found:
        head = f"{lark.marked(tags.name + name)} {before_value(lark, tags)}"
        one = f"{SPACE} {head} {tagged_value(lark, part, tags.end, SPACE, refuse)}"
        parts.append(one if is_required else f"({one})?")
    return " ".join([*parts, SPACE])


def before_value(lark: Lark, tags: ArgumentTags) -> str:
    """What stands between a name and its value."""
    end = lark.any_marked(tags.name_ends)
    return f"{end} {SPACE} {lark.marked(tags.value)}" if tags.value else end


def tagged_value(
    lark: Lark, schema: Mapping[str, Any], end: str, space: str = "", refuse: Refuse | None = None
) -> str:
    """A value and the mark behind it: a text as it is, others as JSON, with this white space around. Raises
    ApiError for a keyword that a text cannot be held to, if one says how to `refuse` it.
    """
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and any(isinstance(value, str) for value in values):
        words = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return f"{space} {one_of(map(literal, words))} {space} {lark.marked(end)}"
    if types_of(schema, schema) != {"string"}:
        return f"{space} {lark.json(schema)} {space} {lark.marked(end)}"
    for keyword in OF_TEXTS:
        if refuse is not None and keyword in schema:
            raise refuse(keyword)
    return lark.until(end)


def properties_of(
    schema: Mapping[str, Any], refuse: Refuse | None
) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """(name, schema, whether it is required) of each property. Raises ApiError if the schema says more than
    that, and one says how to `refuse` it.
    """
    for keyword in WHOLE:
        if refuse is not None and keyword in schema:
            raise refuse(keyword)
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    for name in [*properties, *(name for name in required if name not in properties)]:
        yield name, alone(properties.get(name, {}), schema), name in required


def alone(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema as a schema of its own, with the definitions to which it may refer, and with the
    white space of the whole.
    """
    part = schema if isinstance(schema, Mapping) else {}
    return {**{name: root[name] for name in (*DEFINITIONS, "x-guidance") if name in root}, **part}
