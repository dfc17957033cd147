"""Grammars are compiled, or refused with the keyword at fault and its place."""

import ctypes
import json
from typing import Any

import llguidance
import pytest

from api.errors import ApiError
from api.grammar.apart import run_apart
from api.grammar.check import byte_tokenizer
from api.grammar.compile import (
    MAX_GRAMMAR_BYTES,
    Grammar,
    compile_grammar,
)
from api.grammar.json_schema import enforce
from tests.support.deep_grammars import DEEP

# --- compile ------------------------------------------------------------------------------------------------


def schema(value: Any) -> Grammar:
    return Grammar("json", json.dumps(value), "f")


def nested(depth: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = {"anyOf": [value]}
    return value


SERVED = {
    "true": schema(True),
    "recursive": schema(
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}
    ),
    "annotations": schema({"type": "string", "format": "password", "title": "t", "examples": [{"not": 1}]}),
    "a property that is called as a keyword": schema(
        {"type": "object", "properties": {"not": {"type": "null"}, "format": {"const": {"format": "x"}}}}
    ),
    "a text that is forced without end": Grammar("grammar", 'start: /a+/ "a"', "f"),
    "regex": Grammar("regex", r"\d{4}-\d{2}", "f"),
    "choice": Grammar("choice", '["a", "b\\"c", "été", "/x/", "\\u007f"]', "f"),
    "lark": Grammar("grammar", 'start: "a" | "b" start', "f"),
    "gbnf": Grammar("grammar", 'root ::= "a" | "b" root', "f"),
}

REFUSED = {
    "`f` cannot be compiled: the keyword `uniqueItems` (at `#/properties/a~1b/uniqueItems`) is": schema(
        {"type": "object", "properties": {"a/b": {"type": "array", "uniqueItems": True}}}
    ),
    "the keyword `not` (at `#/$defs/a/not`) is not supported": schema(
        {"$defs": {"a": {"not": {}}}, "items": {"$ref": "#/$defs/a"}, "type": "array"}
    ),
    "`f` cannot be compiled: it is not JSON that can be read: ": Grammar("json", "{", "f"),
    "no value satisfies the schema `false`": schema(False),
    "the keyword `oneOf` (first at `#/items/oneOf`) is supported only where no value can match two": schema(
        {"type": "array", "items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}
    ),
    "its depth must be at most 64. Given: 199": schema(nested(99)),
    "no value satisfies it: required property 'a' is unsatisfiable": schema(
        {"type": "object", "properties": {"a": False}, "required": ["a"]}
    ),
    "no value satisfies it: no text has all that is said of a string (at `#/$defs/a`)": schema(
        {
            "$defs": {"a": {"type": "string", "pattern": "^aaa$", "maxLength": 2}},
            "type": "array",
            "items": {"$ref": "#/$defs/a"},
            "minItems": 1,
        }
    ),
    "retrieving it failed": schema({"$ref": "http://example.com/schema"}),
    "it is too complex: lexer error: too many expressions constructed": schema(
        {"properties": {"a": {"type": "string", "pattern": "^(a?){300}a{300}$"}}, "required": ["a"]}
    ),
    "`f` cannot be compiled: no text satisfies it": Grammar("grammar", "start: A\nA: /a/ & /b/", "f"),
    "its `whitespace_pattern` must match nothing but white space": Grammar("json", "{}", "f", '"+'),
    "it forces a text of more than 8192 bytes": Grammar("regex", "a{9000}", "f"),
    "look-around": Grammar("regex", "(?=a)b", "f"),
    "Expected ::=": Grammar("grammar", "0", "f"),
    f"`f` must have at most {MAX_GRAMMAR_BYTES} characters. Given: {MAX_GRAMMAR_BYTES + 1}": Grammar(
        "regex", "a" * (MAX_GRAMMAR_BYTES + 1), "f"
    ),
}


ENDLESS = schema({"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(100)]})


@pytest.mark.parametrize("name", SERVED)
async def test_a_grammar_is_compiled(name: str) -> None:
    assert await compile_grammar(SERVED[name])


@pytest.mark.parametrize("name", DEEP)
async def test_definitions_and_rules_that_lead_deep_are_compiled(name: str) -> None:
    assert await compile_grammar(DEEP[name])


async def test_a_grammar_that_ends_its_compiler_is_refused_and_the_next_is_compiled() -> None:
    for _ in range(2):
        with pytest.raises(
            ApiError, match="`f` cannot be compiled: it takes more than 10 s, 1024 MiB"
        ) as refusal:
            await run_apart("f", ctypes.string_at, 0)
        assert (refusal.value.status, refusal.value.param) == (422, "f")
        assert await compile_grammar(Grammar("regex", f"a{id(refusal)}", "f"))


@pytest.mark.slow
async def test_a_grammar_that_takes_time_or_memory_without_end_is_refused() -> None:
    with pytest.raises(ApiError, match="`f` cannot be compiled: it takes more than 10 s, 1024 MiB"):
        await compile_grammar(ENDLESS)


@pytest.mark.parametrize("text", REFUSED)
async def test_a_grammar_that_cannot_be_served_is_refused_with_the_reason(text: str) -> None:
    with pytest.raises(ApiError) as refusal:
        await compile_grammar(REFUSED[text])
    assert text in str(refusal.value)
    assert (refusal.value.status, refusal.value.param) == (422, "f")


async def test_white_space_between_the_tokens_of_json_is_bounded() -> None:
    source = await compile_grammar(schema({"type": "object"}))
    spaces = {"": True, " ": True, "  ": False, "\t": False, "\n" + 32 * " ": True, "\n" + 33 * " ": False}
    spaces |= {"\n\n": False, " \n": False}
    for around in ('{%s"a": 1}', '{"a":%s1}', '{"a": [1,%s2]}', '{"a": {}%s}'):
        assert {space: accepts(source, around % space) for space in spaces} == spaces, around


def accepts(source: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(byte_tokenizer(), source, log_level=0)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


# --- json schema --------------------------------------------------------------------------------------------

NAME: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
SHUT = NAME | {"additionalProperties": False}
DEFS: dict[str, Any] = {"$defs": {"P": NAME}}

CLOSED_SCHEMAS = [
    (NAME, SHUT),
    ({"type": "array", "items": NAME}, {"type": "array", "items": SHUT}),
    ({"anyOf": [NAME, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
    (DEFS | {"$ref": "#/$defs/P"}, {"$defs": {"P": SHUT}, "$ref": "#/$defs/P"}),
    ({"properties": {"allOf": NAME}}, {"properties": {"allOf": SHUT}, "additionalProperties": False}),
]
LEFT: list[Any] = [
    NAME | {"additionalProperties": True},
    NAME | {"patternProperties": {"^x": {}}},
    NAME | {"required": ["other"]},
    {"allOf": [NAME, {"properties": {"age": {"type": "integer"}}}]},
    DEFS | NAME | {"$ref": "#/$defs/P"},
    {"items": {"not": NAME}},
]


def enforced(schema: Any) -> Any:
    enforce(own := json.loads(json.dumps(schema)), closed=True)
    return own


@pytest.mark.parametrize(("schema", "closed"), [*CLOSED_SCHEMAS, *((one, one) for one in LEFT)])
def test_objects_that_list_their_properties_get_no_others_unless_a_schema_says_more(
    schema: Any, closed: Any
) -> None:
    assert enforced(schema) == enforced(closed) == closed
