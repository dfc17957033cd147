"""Closing of objects: only where no other part of the schema could require what is shut out."""

from typing import Any

import pytest

from api.grammar.json_schema import close_objects

NAME: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
SHUT = NAME | {"additionalProperties": False}
DEFS: dict[str, Any] = {"$defs": {"P": NAME}}

CLOSED = [
    (NAME, SHUT),
    ({"type": "array", "items": NAME}, {"type": "array", "items": SHUT}),
    ({"anyOf": [NAME, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
    (DEFS | {"$ref": "#/$defs/P"}, {"$defs": {"P": SHUT}, "$ref": "#/$defs/P"}),
    ({"properties": {"allOf": NAME}}, {"properties": {"allOf": SHUT}, "additionalProperties": False}),
]
LEFT: list[Any] = [
    True,
    {"type": "object"},
    NAME | {"additionalProperties": True},
    NAME | {"patternProperties": {"^x": {}}},
    NAME | {"required": ["other"]},
    NAME | {"required": [[]]},
    NAME | {"required": 3},
    NAME | {"minProperties": 2},
    {"allOf": [NAME, {"properties": {"age": {"type": "integer"}}}]},
    {"oneOf": [NAME, {"properties": {"age": {"type": "integer"}}}]},
    DEFS | NAME | {"$ref": "#/$defs/P"},
    {"required": ["age"], "anyOf": [NAME]},
    {"const": NAME, "enum": [NAME], "default": NAME, "examples": [NAME]},
    {"items": {"not": NAME}},
]


@pytest.mark.parametrize(("schema", "closed"), CLOSED)
def test_objects_that_list_their_properties_get_no_others(schema: Any, closed: Any) -> None:
    assert close_objects(schema) == closed
    assert close_objects(closed) == closed


@pytest.mark.parametrize("schema", LEFT)
def test_a_schema_that_says_more_is_left_as_it_is(schema: Any) -> None:
    assert close_objects(schema) == schema
