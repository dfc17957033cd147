"""`patternProperties` that match only names which the object lists."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import llguidance

from api.structured_output.check import can_begin

MAX_MATCHES = 1024
"""Patterns of an object times its names; with more than this, no pattern is tried."""


def list_names(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the patterns that match only listed names. What a pattern says is said of each
    property that it matches.

    With a pattern, llguidance asks for a name that matches it and is not listed, even if there is none.
    """
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(patterns, dict) or not isinstance(properties, dict) or not isinstance(required, list):
        return schema
    names = tuple(dict.fromkeys([*properties, *(name for name in required if isinstance(name, str))]))
    tried = patterns if len(patterns) * len(names) <= MAX_MATCHES else ()
    complete = [pattern for pattern in tried if matches_none_but(pattern, names)]
    for pattern in complete:
        for name in names:
            if matches(pattern, name):
                properties = properties | {name: both(properties.get(name), patterns[pattern])}
    if not complete:
        return schema
    others = {pattern: one for pattern, one in patterns.items() if pattern not in complete}
    return schema | {"properties": properties, "patternProperties": others}


def both(one: Any, other: Any) -> Any:
    return other if one is None else {"allOf": [one, other]}


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
