"""The schemas of functions' arguments, as grammars force them."""

import json
from collections.abc import Mapping
from typing import Any

from api.errors import ApiError, invalid
from api.structured_output.grammar import Grammar, as_compiled, compile_cached
from api.structured_output.schemas import WHITESPACE
from api.tool_calls.reading.deltas import Tool
from api.tool_calls.reading.typed_text import referred

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
OPEN_OBJECT = ("additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf", "$ref", "if")
"""With one of these, a schema says itself which other properties there may be."""
DEFINITIONS = ("$defs", "definitions")
ANNOTATIONS = ("title", "description", "$schema", "$id", "$comment")


def field_of(tool: Tool) -> str:
    return f"tools.{tool.name}.parameters"


def forced_schema(tool: Tool) -> Mapping[str, Any]:
    """The schema that a grammar forces: the function's own, or any object if that cannot be compiled. Raises
    ApiError if the function is strict, and its schema cannot be compiled.
    """
    try:
        schema = closed(tool.parameters)
        compile_cached(Grammar("json", json.dumps(schema), field_of(tool), closed=True))
    except ApiError:
        if tool.strict:
            raise
        return with_whitespace(ANY_OBJECT)
    return with_whitespace(as_compiled(schema, closed=True))


def closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of an object that has only the properties which the schema names."""
    schema = {**(inlined(parameters) or {"properties": {}}), "type": "object"}
    if "properties" in schema and not any(keyword in schema for keyword in OPEN_OBJECT):
        return schema | {"additionalProperties": False}
    return schema


def inlined(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that this one refers to, with its definitions, if it is only a reference; else itself."""
    path = schema.get("$ref")
    if not isinstance(path, str) or not {*schema} <= {"$ref", "type", *DEFINITIONS, *ANNOTATIONS}:
        return schema
    target = referred(path, schema)
    if not isinstance(target, Mapping) or "$ref" in target:
        return schema
    return {name: schema[name] for name in DEFINITIONS if name in schema} | dict(target)


def with_whitespace(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def unsupported(tool: Tool, keyword: str) -> ApiError:
    cause = f"the keyword `{keyword}` is not supported in the format in which this model writes calls"
    return invalid(f"`{field_of(tool)}` cannot be compiled: {cause}", field_of(tool))
