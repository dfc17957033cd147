"""Dead ends are found in grammars of rules and of JSON, however deep they lie behind what is required."""

import json
from random import Random
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.errors import ApiError
from api.grammar.check import byte_tokenizer, find_dead_end, tokens_to_try
from api.grammar.compile import Grammar, compile_checked, compile_unchecked

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
    matcher = llguidance.LLMatcher(byte_tokenizer(), compile_unchecked(grammar), log_level=0)
    way = find_dead_end(matcher, byte_tokenizer().eos_token)
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


VALUES = st.sampled_from([{"type": "integer"}, {"type": "null"}, {"enum": ["x", 1]}, {"maxLength": 1}, False])
NAMES = st.sampled_from(["a", "b", "ab", "é", 'q"'])
PATTERNS = st.sampled_from(["^a", "^a$", "b$", "^[ab]$", "^(a|ab)$", "^.$", "^é", '"', ""])
OBJECTS = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(NAMES, VALUES, max_size=3)},
    optional={
        "patternProperties": st.dictionaries(PATTERNS, VALUES, min_size=1, max_size=2),
        "required": st.lists(NAMES, max_size=2),
        "additionalProperties": st.just(False) | VALUES,
        "minProperties": st.integers(0, 2),
    },
)
SCHEMAS = OBJECTS | st.lists(OBJECTS, min_size=2, max_size=2).map(lambda parts: {"allOf": parts})


@settings(max_examples=30)
@given(SCHEMAS, st.randoms(use_true_random=False))
def test_no_way_into_an_object_that_is_served_leads_nowhere(schema: Any, random: Random) -> None:
    try:
        source = compile_checked(Grammar("json", json.dumps(schema), "f"))
    except ApiError:
        return
    for _ in range(10):
        matcher, text = llguidance.LLMatcher(byte_tokenizer(), source, log_level=0), b""
        while not matcher.is_stopped() and len(text) < 80:
            bytes_ = tokens_to_try(matcher.compute_bitmask(), byte_tokenizer().eos_token)
            assert not matcher.is_error(), (schema, text)
            if not bytes_:
                break
            text += bytes([random.choice(bytes_)])
            matcher.consume_token(text[-1])
