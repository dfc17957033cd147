"""Endings: the text that one gives satisfies its grammar, and its rest is the ending further on."""

import json
from typing import Any

import llguidance
import pytest

from api.structured_output.grammar import Grammar, source_of
from common import model_files
from gpu_worker.engine.sampling.endings import Ending, Endings
from gpu_worker.engine.sampling.matcher import Matchers

EOS = 2
DEEP: dict[str, Any] = {
    "$ref": "#/$defs/n",
    "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}},
}
ITEM = {"type": "object", "properties": {"a": {"enum": ["été", "x"]}, "b": {"type": "number"}}}
STATES: list[tuple[Any, str, str]] = [
    ({"type": "string"}, '"abc', '"'),
    ({"type": "string"}, '"abc \\', '""'),
    ({"type": "string", "minLength": 6}, '"abc', '}}}"'),
    ({"type": "array", "items": ITEM | {"required": ["a", "b"]}}, '[{"a": "é', 'té","b":0}]'),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 3}, "[1", ",0,0]"),
    (DEEP, '{"n": {"n": {"n"', ":{}}}}"),
    ({"type": "string", "pattern": "^(ab)+c$"}, '"ab', 'c"'),
    ({"type": "string", "format": "date"}, '"2024-0', '1-01"'),
    ({"items": {"type": "integer", "minimum": 100}, "type": "array"}, "[1", "23]"),
    ({"anyOf": [{"type": "null"}, {"type": "object"}]}, "", "null"),
    ({"type": "object"}, "{}", ""),
]


@pytest.fixture(scope="module")
def endings() -> Endings:
    return Endings(Matchers(model_files.resolve("smollm2"), 49152, [EOS], waits=True))


def behind(endings: Endings, source: str, ids: list[int]) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(endings.vocabulary, source, log_level=0)
    assert matcher.consume_tokens(ids)
    return matcher


@pytest.mark.parametrize(("schema", "text", "expected"), STATES)
def test_the_ending_of_a_json(endings: Endings, schema: Any, text: str, expected: str) -> None:
    source = source_of(Grammar("json", json.dumps(schema), "f"))
    ids = endings.vocabulary.tokenize_str(text)
    ending = endings.find(behind(endings, source, ids), ids[-1] if ids else None)
    assert ending is not None
    *tokens, last = ending.tokens
    assert last == EOS and endings.vocabulary.decode_str(tokens) == expected
    for place in range(1, len(tokens)):
        further = behind(endings, source, ids + tokens[:place])
        assert endings.find(further, tokens[place - 1]) == Ending([*tokens[place:], EOS], is_whole=True)


@pytest.mark.parametrize(
    ("grammar", "text", "expected"),
    [
        (Grammar("regex", r"\w+@\w+\.\w+", "f"), "a", "@A0a.A"),
        (Grammar("regex", r"[a-z]+ [0-9]{2}", "f"), "abc", " 01"),
        (Grammar("regex", r"\d+", "f"), "12", ""),
        (Grammar("grammar", 'start: "a" <[1]> "b"', "f"), "a", "<|im_start|>b"),
    ],
)
def test_the_ending_of_other_texts(endings: Endings, grammar: Grammar, text: str, expected: str) -> None:
    ids = endings.vocabulary.tokenize_str(text)
    ending = endings.find(behind(endings, source_of(grammar), ids), ids[-1])
    assert ending is not None
    assert endings.vocabulary.decode_str([token for token in ending.tokens if token != EOS]) == expected
