"""Dead ends are found in grammars of rules and of JSON, however deep they lie behind what is required."""

import json
from typing import Any

import pytest

from api.structured_output.dead_ends import find_dead_end
from api.structured_output.grammar import Grammar, source_of
from api.structured_output.vocabulary import byte_vocabulary

CLOSED = {"type": "object", "additionalProperties": False}
TWO: Any = [
    CLOSED | {"properties": {"a": {}}, "patternProperties": {"^[ab]$": {}}},
    {"properties": {"b": {}}, "required": ["b"]},
]
NESTED: Any = CLOSED | {
    "properties": {"x": CLOSED | {"required": ["y"], "properties": {"y": {"allOf": TWO}}}}
}
JSON: dict[str, tuple[Any, str]] = {
    "names of two schemas": ({"allOf": TWO}, '{"a":"","b":"",'),
    "within what is required": (NESTED, '{"x":{"y":{"a":"","b":"",'),
    "in a list": ({"type": "array", "items": {"allOf": TWO}}, '[{"a":"","b":"",'),
    "one of two": ({"anyOf": [{"type": "null"}, {"allOf": TWO}]}, '{"a":"","b":"",'),
    "none": ({"type": "object"}, ""),
    "none, with patterns": (CLOSED | {"properties": {"ab": {}}, "patternProperties": {"^a": {}}}, ""),
    "none that may come": (CLOSED | {"properties": {"a": {"type": "string", "maxLength": 0}}}, ""),
}
LARK = {
    'start: "a" (B | C)\nB: /[a-z]/ & /[0-9]/\nC: /x/ & /y/': "a",
    'start: /[a-z]{9}/ item*\nitem: "," NAME\nNAME: /[a-z]/ & /[0-9]/': "aaaaaaaaa,",
    'start: /a+/ "a"': "",
    'start: "a" start | "b"': "",
}


def text_before(grammar: Grammar) -> str:
    """The text before the dead end that is found, without the space that may stand there; "" for none."""
    way = find_dead_end(source_of(grammar), byte_vocabulary())
    return bytes(way.text).decode().rstrip() if way else ""


@pytest.mark.parametrize("name", JSON)
def test_dead_ends_of_json_are_found(name: str) -> None:
    schema, text = JSON[name]
    assert text_before(Grammar("json", json.dumps(schema), "f")) == text


@pytest.mark.parametrize("rules", LARK)
def test_dead_ends_of_rules_are_found(rules: str) -> None:
    assert text_before(Grammar("grammar", rules, "f")) == LARK[rules]


@pytest.mark.parametrize("pattern", ["a+", "[a-z]{40}", r"(\d+,)*x", ".*"])
def test_a_regex_has_none(pattern: str) -> None:
    assert text_before(Grammar("regex", pattern, "f")) == ""
