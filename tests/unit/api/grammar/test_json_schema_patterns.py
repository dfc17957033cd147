"""Patterns that match listed names only become a part of what these properties satisfy."""

from typing import Any

import pytest

from api.grammar.json_schema import list_names

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
def test_others_stay(name: str) -> None:
    assert list_names(OTHERS[name]) == OTHERS[name]
