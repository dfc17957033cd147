"""Endings: the text that one gives satisfies its grammar, and its rest is the ending further on."""

import json
from typing import Any

import llguidance
import pytest

from api.structured_output.grammar import Grammar, source_of
from api.structured_output.lark import Lark
from common import model_files
from gpu_worker.engine.sampling.ending_search import Ending, EndingSearch
from gpu_worker.engine.sampling.endings import steering_of
from gpu_worker.engine.sampling.exits import exits_of
from gpu_worker.engine.sampling.matcher import Matchers

EOS = 2
DEEP: dict[str, Any] = {
    "$ref": "#/$defs/n",
    "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}},
}
ITEM = {"type": "object", "properties": {"a": {"enum": ["été", "x"]}, "b": {"type": "number"}}}


def json_of(schema: Any) -> Grammar:
    return Grammar("json", json.dumps(schema), "f")


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
    ({"enum": ["a<|im_end|>b"]}, '"a', '<|im_end|>b"'),
]


@pytest.fixture(scope="module")
def search() -> EndingSearch:
    return EndingSearch(Matchers(model_files.resolve("smollm2"), 49152, [EOS], waits=True).vocabulary)


def behind(search: EndingSearch, source: str, ids: list[int]) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(search.vocabulary, source, log_level=0)
    assert matcher.consume_tokens(ids)
    return matcher


@pytest.mark.parametrize(("schema", "text", "expected"), STATES)
def test_a_json_ends_with_its_shortest_text(
    search: EndingSearch, schema: Any, text: str, expected: str
) -> None:
    source = source_of(json_of(schema))
    ids = search.vocabulary.tokenize_str(text)
    ending = search.find(behind(search, source, ids), ids[-1] if ids else None)
    assert ending is not None
    *tokens, last = ending.tokens
    assert last == EOS and search.vocabulary.decode_str(tokens) == expected
    for place in range(1, len(tokens)):
        further = behind(search, source, ids + tokens[:place])
        assert search.find(further, tokens[place - 1]) == Ending([*tokens[place:], EOS], is_whole=True)


def thought() -> Grammar:
    """As a gateway writes it."""
    lark = Lark({})
    return Grammar("grammar", lark.source(f"{lark.until('</think>')} {lark.json({'type': 'object'})}"), "f")


THOUGHT = 'start: thought answer\nthought[lazy]: /(.|\\n)*/ "</think>"\nanswer: %json {"type": "object"}'
PATTERNS: list[tuple[Grammar, str, str]] = [
    (json_of({"type": "string", "pattern": "push"}), '"ab pu', 'sh"'),
    (json_of({"type": "string", "pattern": "^file:.+\\.geo$"}), '"file:a/b.ge', 'o"'),
    (json_of({"type": "string", "pattern": "^[a-z]+(-+[a-z]+)*-v\\d+$"}), '"we', '-v0"'),
    (json_of({"type": "string", "pattern": "^\\w+@\\w+$", "minLength": 8}), '"a', '@A0a_AA"'),
    (json_of({"type": "string", "format": "email"}), '"bob', '@A"'),
    (
        json_of({"patternProperties": {"^p.*_$": {}}, "additionalProperties": False, "type": "object"}),
        '{"pa',
        '_":""}',
    ),
    (Grammar("grammar", THOUGHT, "f"), "We think </th", "ink>{}"),
    (thought(), "We think </th", "ink>{}"),
    (Grammar("grammar", 'start: /(.|\\n)*/ <[1]> "b"', "f"), "We think", "<|im_start|>b"),
]


@pytest.mark.parametrize(("grammar", "text", "expected"), PATTERNS)
def test_the_ending_of_texts_that_single_bytes_do_not_end(
    search: EndingSearch, grammar: Grammar, text: str, expected: str
) -> None:
    source = source_of(grammar)
    exits = exits_of(search, source)
    ids = search.vocabulary.tokenize_str(text)
    ending = search.find(behind(search, source, ids), ids[-1], exits)
    assert ending is not None
    *tokens, last = ending.tokens
    assert last == EOS and search.vocabulary.decode_str(tokens) == expected
    for place in range(1, len(tokens)):
        further = search.find(behind(search, source, ids + tokens[:place]), tokens[place - 1], exits)
        assert further is not None and len(further.tokens) <= len(tokens) - place + 1


@pytest.mark.parametrize(
    "text",
    [
        "<[49152]>",
        "<[99999999999]>",
        f"<[{'9' * 5000}]>",
        f"%json {'[' * 9000}",
        f"%json {'[' * 900}{']' * 900}",
    ],
    ids=["beyond the vocabulary", "of 37 bits", "of many digits", "endless", "deep"],
)
def test_texts_that_only_look_like_special_tokens_or_schemas_are_no_exits(
    search: EndingSearch, text: str
) -> None:
    """A client may write them; an error here would end the engine."""
    source = source_of(Grammar("grammar", f'start: /(.|\\n)*/ <[1]> "{text}"', "f"))
    assert steering_of(search, source).exits.of_text == [[1]]


@pytest.mark.parametrize(
    ("grammar", "text", "expected"),
    [
        (Grammar("regex", r"\w+@\w+\.\w+", "f"), "a", "@A0a.A"),
        (Grammar("regex", r"[a-z]+ [0-9]{2}", "f"), "abc", " 01"),
        (Grammar("regex", r"\d+", "f"), "12", ""),
        (Grammar("grammar", 'start: "a" <[1]> "b"', "f"), "a", "<|im_start|>b"),
    ],
)
def test_other_texts_end_with_their_shortest_text(
    search: EndingSearch, grammar: Grammar, text: str, expected: str
) -> None:
    ids = search.vocabulary.tokenize_str(text)
    ending = search.find(behind(search, source_of(grammar), ids), ids[-1])
    assert ending is not None
    assert search.vocabulary.decode_str([token for token in ending.tokens if token != EOS]) == expected
