"""Objects are closed where no other part of the schema could require what is shut out. Patterns that match
listed names only become a part of what these properties satisfy.
"""

from typing import Any

import pytest

from api.grammar.json_schema import close_objects, list_names

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


# --- patterns -----------------------------------------------------------------------------------------------

INTEGER, SMALL = {"type": "integer"}, {"maximum": 9}
LISTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a listed name": (
        {"properties": {"a": INTEGER}, "patternProperties": {"^a$": SMALL}},
        {"properties": {"a": {"allOf": [INTEGER, SMALL]}}, "patternProperties": {}},
    ),
    "a required name": (
        {"required": ["a"], "patternProperties": {"^a$": SMALL, "^x": {}}},
        {"required": ["a"], "properties": {"a": SMALL}, "patternProperties": {"^x": {}}},
    ),
    "some of the listed": (
        {"properties": {"a": {}, "b": {}, "c": {}}, "patternProperties": {"^[ab]$": SMALL}},
        {
            "properties": {"a": {"allOf": [{}, SMALL]}, "b": {"allOf": [{}, SMALL]}, "c": {}},
            "patternProperties": {},
        },
    ),
    "a name that is escaped": (
        {"properties": {'"é\\': {}}, "patternProperties": {'^"é\\\\$': SMALL}},
        {"properties": {'"é\\': {"allOf": [{}, SMALL]}}, "patternProperties": {}},
    ),
}
OTHERS: dict[str, dict[str, Any]] = {
    "others, too": {"properties": {"ab": {}}, "patternProperties": {"^a": SMALL}},
    "no listed name": {"patternProperties": {"^a$": SMALL}},
    "not a pattern": {"properties": {"a": {}}, "patternProperties": {"(": SMALL}},
    "not objects": {"properties": ["a"], "patternProperties": {"^a$": SMALL}, "required": "a"},
    "too many": {
        "properties": {str(number): {} for number in range(2000)},
        "patternProperties": {"^1$": SMALL},
    },
}


@pytest.mark.parametrize("name", LISTED)
def test_a_pattern_of_listed_names_is_gone(name: str) -> None:
    schema, expected = LISTED[name]
    assert list_names(schema) == expected


@pytest.mark.parametrize("name", OTHERS)
def test_other_patterns_stay(name: str) -> None:
    assert list_names(OTHERS[name]) == OTHERS[name]
