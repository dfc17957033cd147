"""JSON schema: what is enforced of one. Objects are closed where that is safe, and patterns that match only
listed names become a part of what those names satisfy.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import llguidance

from api.grammar.check import can_begin

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
MAX_MATCHES = 1024
"""Patterns of an object times its names; with more than this, no pattern is tried."""


def enforce(schema: dict[str, Any], closed: bool) -> None:
    """Turn a schema into what is enforced of it: annotations are left out; objects are closed if `closed`."""
    for _, one in list(all_schemas(schema)):
        drop_annotations(one)
    schemas = [one for _, one in all_schemas(schema)]
    if closed:
        close_objects(schemas)
    for one in schemas:
        list_names(one)


def drop_annotations(schema: dict[str, Any]) -> None:
    """Take away a format that is not enforced, and llguidance's own options."""
    schema.pop("x-guidance", None)
    if schema.get("format") not in FORMATS:
        schema.pop("format", None)


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
                    yield from all_schemas(item, f"{path}/{name}/{escape_pointer(key)}")
            elif name not in VALUES:
                yield from all_schemas(value, f"{path}/{escape_pointer(name)}")


def escape_pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


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


# --- patterns of listed names -------------------------------------------------------------------------------


def list_names(schema: dict[str, Any]) -> None:
    """Take away the patterns that match only listed names. What a pattern says is said of each property that
    it matches.

    With a pattern, llguidance asks for a name that matches it and is not listed, even if there is none.
    """
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(patterns, dict) or not isinstance(properties, dict) or not isinstance(required, list):
        return
    names = tuple(dict.fromkeys([*properties, *(name for name in required if isinstance(name, str))]))
    tried = patterns if len(patterns) * len(names) <= MAX_MATCHES else ()
    complete = [pattern for pattern in tried if matches_none_but(pattern, names)]
    for pattern in complete:
        for name in names:
            if matches(pattern, name):
                own, other = properties.get(name), patterns[pattern]
                properties = properties | {name: other if own is None else {"allOf": [own, other]}}
    if complete:
        others = {pattern: one for pattern, one in patterns.items() if pattern not in complete}
        schema.update(properties=properties, patternProperties=others)


@functools.lru_cache(maxsize=1024)
def matches_none_but(pattern: str, names: tuple[str, ...]) -> bool:
    """Whether a pattern matches no other names. False for one that cannot be compiled."""
    listed = {name: {"const": 0} for name in names}
    schema = {"properties": listed, "required": names, "patternProperties": {pattern: {"const": 0}}}
    begin = "".join(f"{json.dumps(name, ensure_ascii=False)}:0," for name in names)
    return bool(names) and begins(schema, f"{{{begin}") and not begins(schema, f'{{{begin}"')


@functools.lru_cache(maxsize=1024)
def matches(pattern: str, name: str) -> bool:
    schema = {"patternProperties": {pattern: {"const": 0}}}
    return begins(schema, f"{{{json.dumps(name, ensure_ascii=False)}:")


def begins(schema: Mapping[str, Any], text: str) -> bool:
    """Whether an object of a closed schema can begin with a text."""
    closed = json.dumps({"type": "object", **schema, "additionalProperties": False})
    source = llguidance.LLMatcher.grammar_from_json_schema(closed, overrides={"whitespace_pattern": ""})
    return can_begin(source, text)
