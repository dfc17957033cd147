"""JSON schemas as trees: every schema in a schema, changed one by one; objects that are closed."""

from collections.abc import Callable, Iterator
from typing import Any

WHITESPACE = r"(\x20|\n\x20{0,32})?"
"""White space between the tokens of JSON: none, a space, or a line that is indented. More than that, a model
could write for ever.
"""
NAMES_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose keys are names, not keywords."""
VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are data, not schemas."""
COMBINING = frozenset(
    "allOf oneOf not if dependentSchemas dependentRequired unevaluatedProperties $dynamicRef".split()
)
"""Keywords by which an object may have to satisfy several schemas, or exactly one of several."""
OF_OBJECTS = frozenset("properties required minProperties maxProperties propertyNames".split()) | {
    "patternProperties",
    "additionalProperties",
}
ELSEWHERE = frozenset({"$ref", "anyOf"})
"""Keywords by which a schema refers to others."""


def map_schemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with `change` made to every schema in it, inner ones first."""
    if isinstance(schema, list):
        return [map_schemas(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return change(
        {
            name: value
            if name in VALUES
            else {key: map_schemas(item, change) for key, item in value.items()}
            if name in NAMES_OF_SCHEMAS and isinstance(value, dict)
            else map_schemas(value, change)
            for name, value in schema.items()
        }
    )


def all_schemas(schema: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in the schema, itself first, each with its JSON pointer (RFC 6901)."""
    if isinstance(schema, list):
        for i, item in enumerate(schema):
            yield from all_schemas(item, f"{path}/{i}")
    elif isinstance(schema, dict):
        yield path, schema
        for name, value in schema.items():
            if name in NAMES_OF_SCHEMAS and isinstance(value, dict):
                for key, item in value.items():
                    yield from all_schemas(item, f"{path}/{name}/{escape(key)}")
            elif name not in VALUES:
                yield from all_schemas(value, f"{path}/{escape(name)}")


def escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def close_objects(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in each object that lists its properties and says nothing
    of others: OpenAI's strict mode and TGI's grammars mean that. A small model takes the freedom that JSON
    Schema leaves there for an invitation, and writes properties until `max_tokens`.

    What satisfies the closed schema satisfies the open one. A schema that combines its parts is left as it
    is: what one part closes, another may require.
    """
    return schema if any(combines(one) for _, one in all_schemas(schema)) else map_schemas(schema, close)


def combines(schema: dict[str, Any]) -> bool:
    """Whether an object may have to satisfy this schema and another one."""
    elsewhere = ELSEWHERE & schema.keys()
    return (
        bool(COMBINING & schema.keys())
        or len(elsewhere) > 1
        or bool(elsewhere and OF_OBJECTS & schema.keys())
    )


def close(schema: dict[str, Any]) -> dict[str, Any]:
    names, required = schema.get("properties"), schema.get("required", [])
    says_more = OF_OBJECTS & schema.keys() - {"properties", "required", "maxProperties"}
    if not names or not isinstance(names, dict) or says_more or not isinstance(required, list):
        return schema
    known = all(isinstance(name, str) and name in names for name in required)
    return schema | {"additionalProperties": False} if known else schema
