"""JSON schema: what is enforced of one. Objects are closed where that is safe."""

from collections.abc import Iterator, Sequence
from typing import Any

WHITESPACE = r"(\x20|\n\x20{0,32})?"
"""White space between the tokens of JSON: none, a space, or a new line with its indent. A model could write
more than that for ever.
"""
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats that are enforced; others are annotations, as in JSON Schema."""
NAMES_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose keys are names, not keywords."""
VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are data, not schemas."""
COMBINING = frozenset(
    "allOf oneOf not if dependentSchemas dependentRequired unevaluatedProperties $dynamicRef".split()
)
"""Keywords by which an object may have to satisfy several schemas, or exactly one of several."""
REFERRING = frozenset({"$ref", "anyOf"})
"""Keywords by which a schema refers to others."""
OF_OBJECTS = frozenset(
    "properties required minProperties maxProperties propertyNames patternProperties".split()
) | {"additionalProperties"}


def enforce(schema: dict[str, Any], closed: bool) -> None:
    """Turn a schema into what is enforced of it: annotations are left out; objects are closed if `closed`."""
    schemas = [*all_schemas(schema)]
    for one in schemas:
        drop_annotations(one)
    if closed:
        close_objects(schemas)


def drop_annotations(schema: dict[str, Any]) -> None:
    """Take away a format that is not enforced, and llguidance's own options."""
    schema.pop("x-guidance", None)
    if schema.get("format") not in FORMATS:
        schema.pop("format", None)


def all_schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema in the schema, itself first."""
    if isinstance(schema, list):
        for item in schema:
            yield from all_schemas(item)
    elif isinstance(schema, dict):
        yield schema
        for name, value in schema.items():
            if name in NAMES_OF_SCHEMAS and isinstance(value, dict):
                yield from all_schemas([*value.values()])
            elif name not in VALUES:
                yield from all_schemas(value)


# --- closed objects -----------------------------------------------------------------------------------------


def close_objects(schemas: Sequence[dict[str, Any]]) -> None:
    """Add `additionalProperties: false` to each object that lists its properties and says nothing of others:
    OpenAI's strict mode and TGI's grammars mean that. Where other properties are allowed, a small model
    writes them until `max_tokens`.

    What satisfies the closed schema satisfies the open one. A schema that combines its parts is left as it
    is: what one part closes, another may require.
    """
    if not any(map(combines, schemas)):
        for one in filter(lists_its_names, schemas):
            one["additionalProperties"] = False


def combines(schema: dict[str, Any]) -> bool:
    """Whether an object may have to satisfy this schema and another one."""
    referring = REFERRING & schema.keys()
    return (
        bool(COMBINING & schema.keys())
        or len(referring) > 1
        or bool(referring and OF_OBJECTS & schema.keys())
    )


def lists_its_names(schema: dict[str, Any]) -> bool:
    """Whether an object lists its properties, also the required ones, and says nothing of others."""
    names, required = schema.get("properties"), schema.get("required", [])
    says_more = OF_OBJECTS & schema.keys() - {"properties", "required", "maxProperties"}
    if not names or not isinstance(names, dict) or says_more or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in names for name in required)
