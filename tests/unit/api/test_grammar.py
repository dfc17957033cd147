"""Grammars are compiled, or refused with the keyword at fault and its place.
Under its grammar a model without sense calls functions that exist, with arguments of their schema.
The shapes in which clients ask for structured output give the same grammars.
Structural tags: texts in which structured parts stand between tags; others are refused by name.
"""

import asyncio
import ctypes
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from api.answers.call_formats import CALL_FORMATS, PAIR, PARAMETER, REASONING_FORMATS, ReasoningFormat
from api.answers.scanner import Tool
from api.errors import ApiError
from api.grammar.compile import (
    ANY_OBJECT,
    BYTES,
    MAX_GRAMMAR_BYTES,
    Grammar,
    compile_checked,
    compile_grammar,
    read_response_format,
    read_structured_outputs,
    run_apart,
)
from api.grammar.force import answer_source, call_grammar
from api.grammar.lark import WHITESPACE, enforced
from api.protocols.chat import ChatRequest
from common import model_files
from tests.support.deep_grammars import DEEP
from tests.support.tokenizer import model_tokenizer
from tests.support.tool_calls import SCHEMA, Answer, Reading

# --- compile ------------------------------------------------------------------------------------------------


def schema(value: Any) -> Grammar:
    return Grammar("json", json.dumps(value), "f")


SERVED = {
    "recursive": schema(
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}
    ),
    "annotations": schema({"type": "string", "format": "password", "title": "t", "examples": [{"not": 1}]}),
    "a property that is called as a keyword": schema(
        {"type": "object", "properties": {"not": {"type": "null"}, "format": {"const": {"format": "x"}}}}
    ),
    "a name that is no URI": schema({"$defs": {"Pagé [int]": {}}, "$ref": "#/$defs/Pagé [int]"}),
    "keywords that allow everything": schema(
        {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"uniqueItems": False},
        }
    ),
    "a text that is forced without end": Grammar("grammar", 'start: /a+/ "a"', "f"),
    "regex": Grammar("regex", r"\d{4}-\d{2}", "f"),
    "choice": Grammar("choice", '["a", "b\\"c", "été", "/x/", "\\u007f"]', "f"),
    "many choices": Grammar("choice", json.dumps([f"label {number}" for number in range(3000)]), "f"),
    "lark": Grammar("grammar", 'start: "a" | "b" start', "f"),
    "lark whose start is inlined": Grammar("grammar", '?start: rest\nrest: "a"', "f"),
    "gbnf": Grammar("grammar", 'root ::= "a" | "b" root', "f"),
}

REFUSED = {
    '`f` cannot be compiled: Unimplemented keys: ["uniqueItems"]': schema(
        {"type": "object", "properties": {"a/b": {"type": "array", "uniqueItems": True}}}
    ),
    'Unimplemented keys: ["not"]': schema(
        {"$defs": {"a": {"not": {}}}, "items": {"$ref": "#/$defs/a"}, "type": "array"}
    ),
    'Unimplemented keys: ["if"]': schema({"type": "array", "if": {"type": "null"}}),
    "oneOf constraints are not supported": schema(
        {"type": "array", "items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}
    ),
    "Unsatisfiable schema: required property 'a' is unsatisfiable": schema(
        {"type": "object", "properties": {"a": False}, "required": ["a"]}
    ),
    "while processing json-schema:///#/$defs/a": schema(
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
    crash: Any = ctypes.string_at
    for _ in range(2):
        with pytest.raises(
            ApiError, match="`f` cannot be compiled: it takes more than 10 s, 1024 MiB"
        ) as refusal:
            await run_apart("f", crash, 0)
        assert (refusal.value.status, refusal.value.param) == (422, "f")
        assert await compile_grammar(Grammar("regex", f"a{id(refusal)}", "f"))


async def test_a_grammar_whose_compiler_is_killed_by_others_is_compiled_by_the_next(tmp_path: Path) -> None:
    """Where memory is short the kernel kills the compiler first. No grammar is refused for that."""
    place = f"__import__('pathlib').Path({str(tmp_path / 'tried')!r})"
    killed = "__import__('os').kill(__import__('os').getpid(), 9)"
    assert await run_apart("f", eval, f"'compiled' if {place}.exists() else {place}.touch() or {killed}")
    for _ in range(2):
        with pytest.raises(ApiError, match="the compiler of grammars was killed") as refusal:
            await run_apart("f", eval, killed)
        assert refusal.value.status == 503


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


async def test_properties_alone_mean_an_object() -> None:
    """As in the example of TGI's clients."""
    source = await compile_grammar(schema({"properties": {"a": {"type": "integer"}}, "required": ["a"]}))
    assert [accepts(source, text) for text in ('{"a": 1}', "5", "null")] == [True, False, False]


async def test_white_space_between_the_tokens_of_json_is_bounded() -> None:
    source = await compile_grammar(schema({"type": "object"}))
    spaces = {"": True, " ": True, "  ": False, "\t": False, "\n" + 32 * " ": True, "\n" + 33 * " ": False}
    spaces |= {"\n\n": False, " \n": False}
    for around in ('{%s"a": 1}', '{"a":%s1}', '{"a": [1,%s2]}', '{"a": {}%s}'):
        assert {space: accepts(source, around % space) for space in spaces} == spaces, around


def accepts(source: str, given: str | list[int], known: llguidance.LLTokenizer = BYTES) -> bool:
    """Whether a text, or these tokens, are all that a grammar wants."""
    tokens = list(given.encode()) if isinstance(given, str) else given
    matcher = llguidance.LLMatcher(known, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


# --- json schema --------------------------------------------------------------------------------------------

NAME: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
SHUT = NAME | {"additionalProperties": False}
DEFS: dict[str, Any] = {"$defs": {"P": NAME}}

CLOSED_SCHEMAS = [
    (NAME, SHUT),
    ({"type": "array", "items": NAME}, {"type": "array", "items": SHUT}),
    ({"anyOf": [NAME, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
    (DEFS | {"$ref": "#/$defs/P"}, {"$defs": {"P": SHUT}, "$ref": "#/$defs/P"}),
    (
        {"properties": {"allOf": NAME}},
        {"type": "object", "properties": {"allOf": SHUT}, "additionalProperties": False},
    ),
]
LEFT: list[Any] = [
    NAME | {"additionalProperties": True},
    NAME | {"patternProperties": {"^x": {}}},
    NAME | {"required": ["other"]},
    {"allOf": [NAME, {"type": "object", "properties": {"age": {"type": "integer"}}}]},
    DEFS | NAME | {"$ref": "#/$defs/P"},
]


def shut(schema: Any) -> Any:
    own = enforced(json.loads(json.dumps(schema)), closed=True)
    return {name: value for name, value in own.items() if name != "x-guidance"}


@pytest.mark.parametrize(("schema", "closed"), [*CLOSED_SCHEMAS, *((one, one) for one in LEFT)])
def test_objects_that_list_their_properties_get_no_others_unless_a_schema_says_more(
    schema: Any, closed: Any
) -> None:
    assert shut(schema) == shut(closed) == closed


# --- force --------------------------------------------------------------------------------------------------

ENDINGS = ('"', "}", "]", ")", "1", "true")
"""Tokens that bring values to their end."""
MAX_TOKENS = 400


@functools.cache
def vocabulary() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(str(model_files.resolve("smollm2") / "tokenizer.json"))


class Walker:
    """Walks through grammars with a model's tokens."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.marks = {token: mark.encode() for mark, token in special_ids.items()}
        encoded = [vocabulary().tokenize_str(text) for text in ENDINGS]
        self.endings = np.array([*(ids[0] for ids in encoded if len(ids) == 1), *self.marks])

    def walk(self, source: str, seed: int, *marks: str) -> str:
        """The text of a walk to the grammar's end. Marks that must come are tried now and then, since chance
        would not find them.
        """
        random = Random(seed)
        matcher = llguidance.LLMatcher(vocabulary(), source, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens: list[int] = []
        while not matcher.is_stopped():
            assert len(tokens) < MAX_TOKENS, self.text(tokens)
            ahead = vocabulary().tokenize_str(random.choice(marks)) if marks and random.random() < 0.2 else []
            if not ahead or matcher.validate_tokens(ahead) < len(ahead):
                ahead = [self.step(matcher, random)]
            if ahead[0] == vocabulary().eos_token:
                break
            assert matcher.consume_tokens(ahead), matcher.get_error()
            tokens += ahead
        return self.text(tokens)

    def step(self, matcher: llguidance.LLMatcher, random: Random) -> int:
        mask = allocate_token_bitmask(1, vocabulary().vocab_size)
        fill_next_token_bitmask(matcher, mask)
        allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
        if allowed[vocabulary().eos_token] and random.random() < 0.5:
            return vocabulary().eos_token
        endings = self.endings[allowed[self.endings] != 0]
        found = endings if len(endings) and random.random() < 0.5 else np.flatnonzero(allowed)
        assert len(found), matcher.get_error()
        return int(found[random.randrange(len(found))])

    def text(self, tokens: list[int]) -> str:
        pieces = [self.marks.get(token) or vocabulary().decode_bytes([token]) for token in tokens]
        return b"".join(pieces).decode(errors="replace")


WEATHER = Tool("weather", SCHEMA | {"required": ["city", "units", "days"]}, strict=True)
TOOLS = (
    WEATHER,
    Tool("now", {"type": "object", "properties": {}}),
    Tool("maybe", {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "boolean"}}}),
    Tool("bare", {}),
)
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
QWEN = REASONING_FORMATS["qwen3"]
Choice = tuple[bool, bool]
"""Whether a call is required, and whether there may be several."""
ONE, SOME, ANY = (True, False), (True, True), (False, True)
FIRST_SPECIAL = 3
"""The id of the first special token that stands for a mark."""


def special_ids(*marks: str) -> Mapping[str, int]:
    return {mark: FIRST_SPECIAL + i for i, mark in enumerate(marks)}


def grammar(name: str, choice: Choice, ids: Mapping[str, int], tools: tuple[Tool, ...] = TOOLS) -> str:
    return asyncio.run(call_grammar(CALL_FORMATS[name], tools, ids, *choice))


def walk(name: str, choice: Choice, ids: Mapping[str, int], seed: int) -> Answer:
    form = CALL_FORMATS[name]
    marks = [mark for mark in (PARAMETER.end, PAIR.end) if mark not in ids]
    text = Walker(ids).walk(grammar(name, choice, ids), seed, *marks)
    return Reading(form, tools=TOOLS).read(text)


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("are_special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_required_call_is_valid(name: str, are_special: bool) -> None:
    ids = special_ids(*CALL_FORMATS[name].marks) if are_special or name == "openai" else {}
    answer = walk(name, SOME, ids, 0)
    assert answer.calls and not answer.content
    check(answer.calls)
    answer = walk(name, ONE, ids, 1)
    assert len(answer.calls) == 1
    check(answer.calls)


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_with_a_strict_function_text_is_free_and_calls_are_valid(name: str) -> None:
    ids = special_ids(*CALL_FORMATS[name].marks)
    answer = walk(name, ANY, ids, 0)
    check([call for call in answer.calls if call[0] == WEATHER.name])


def accepts_after(source: str, text: str) -> bool:
    """Whether a text can begin so."""
    tokens = vocabulary().tokenize_str(text)
    matcher = llguidance.LLMatcher(vocabulary(), source, log_level=0)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens))


@pytest.mark.parametrize(
    ("name", "schema", "words"),
    [
        (
            "pythonic",
            {"properties": {"my name": {"type": "string"}}},
            "`properties/my name` is not supported",
        ),
        ("hermes", {"description": "a" * MAX_GRAMMAR_BYTES}, "`tools` must have at most"),
    ],
    ids=["no name in Python", "many tools"],
)
def test_nothing_is_forced_without_need_where_a_call_cannot_be_written(
    name: str, schema: Mapping[str, Any], words: str
) -> None:
    tools = (Tool("f", {"type": "object", **schema}),)
    assert grammar(name, ANY, {}, tools) == ""
    with pytest.raises(ApiError, match=words):
        grammar(name, ONE, {}, tools)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "tgi"])
@pytest.mark.parametrize("is_required", [False, True])
def test_a_strict_functions_schema_is_refused_by_name(name: str, is_required: bool) -> None:
    strict = Tool("f", {"type": "object", "properties": {"a": {"not": {}}}}, strict=True)
    with pytest.raises(ApiError, match=r"`tools\.f\.parameters` .* Unimplemented keys: \[\"not\"\]"):
        grammar(name, (is_required, True), {}, (TOOLS[1], strict))


@pytest.mark.parametrize(
    "more", [{"properties": {"a": {"type": "string", "pattern": "b"}}}, {"minProperties": 1}]
)
def test_formats_of_single_arguments_refuse_what_they_cannot_force(more: Mapping[str, Any]) -> None:
    tool = Tool("f", {"properties": {"a": {"type": "integer"}}, **more}, strict=True)
    with pytest.raises(ApiError, match=r"`tools\.f\.parameters` .* in which this model writes calls"):
        grammar("glm45", ONE, {}, (tool,))
    assert grammar("hermes", ONE, {}, (Tool("f", {"type": "object", "properties": {}}, strict=True),))


def test_arguments_are_an_object_whatever_their_schema_refers_to() -> None:
    listed = Tool("f", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array"}}})
    source = grammar("hermes", ONE, {}, (listed,))
    assert not accepts_after(source, '<tool_call>\n{"name": "f", "arguments": [')
    assert accepts_after(source, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic", "hermes"])
def test_references_to_the_whole_mean_the_whole_in_single_arguments(name: str) -> None:
    leaves = {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    tree = {"children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}, "leaves": leaves}
    parts = {**tree, "more": {"$ref": "#/properties/leaves/items"}}
    schema = {"type": "object", "properties": parts, "required": [*parts], "additionalProperties": False}
    tool, form = Tool("f", schema, strict=True), CALL_FORMATS[name]
    walker, source = Walker({}), grammar(name, ONE, {}, (tool,))
    for seed in range(3):
        text = walker.walk(source, seed, PARAMETER.end, PAIR.end)
        [(_, arguments)] = Reading(form, tools=(tool,)).read(text).calls
        jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": "http://json-schema.org/draft-04/schema#", "properties": {"a": {"type": "integer"}}},
        {"allOf": [{"required": ["a"], "properties": {"a": {"type": "integer"}}}], "properties": {"b": {}}},
        {"$ref": "#/$defs/f", "$defs": {"f": {"type": "object", "additionalProperties": {"type": "null"}}}},
    ],
    ids=["old", "all", "reference"],
)
def test_tgis_name_is_beside_the_arguments_of_any_schema(schema: Mapping[str, Any]) -> None:
    tool = Tool("f", schema, strict=True)
    for seed in range(2):
        text = Walker({}).walk(grammar("tgi", ONE, {}, (tool,)), seed)
        [(name, arguments)] = Reading(CALL_FORMATS["tgi"]).read(text).calls
        assert name == "f"
        jsonschema.validate(json.loads(arguments), schema)


# --- after thinking -----------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
JSON = Grammar("json", '{"type": "object", "properties": {"a": {"type": "null"}}}', "f")


def after(form: ReasoningFormat | None, prompt: str, calls: str = "", text: str = "") -> str:
    return answer_source(calls, text, CALL_FORMATS["hermes"], form, prompt, {})


@pytest.mark.parametrize(
    ("prompt", "text", "is_accepted"),
    [
        ("", f"<think>\nNow <or> never.</think>\n\n{CALL}", True),
        ("", CALL, True),
        ("", "Now", False),
        ("<think>\n", f"Now.</think>\n\n{CALL}", True),
        ("<think>\n", "Now.</think>It", False),
        ("<think>\n\n</think>\n\n", CALL, True),
        ("<think>\n\n</think>\n\n", "<think>", False),
    ],
)
def test_a_call_is_forced_after_thinking(prompt: str, text: str, is_accepted: bool) -> None:
    assert accepts_after(after(QWEN, prompt, grammar("hermes", ONE, {})), text) == is_accepted


KINDS = [JSON, Grammar("regex", r'\{"a":null\}', "f"), Grammar("choice", '["{\\"a\\":null}"]', "f")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_structured_output_begins_after_thinking(kind: Grammar) -> None:
    source = asyncio.run(compile_grammar(kind))
    within = after(QWEN, "<think>\n", text=source)
    assert accepts_after(within, 'Maybe {x}.</think>\n{"a":null}')
    assert not accepts_after(within, "Maybe.</think>\nno")
    assert accepts_after(after(QWEN, "", text=source), '{"a":null}')
    assert after(QWEN, "<think></think>", text=source) == after(None, "", text=source) == source


def test_in_harmony_structured_output_is_the_final_message() -> None:
    source = asyncio.run(compile_grammar(JSON))
    form = CALL_FORMATS["openai"]
    ids = special_ids(*form.marks)
    for seed in range(2):
        text = Walker(ids).walk(answer_source("", source, form, None, "", ids), seed)
        assert isinstance(json.loads(Reading(form).read(text).content), dict)


# --- read ---------------------------------------------------------------------------------------------------

A_SCHEMA = {"type": "object"}
TEXT = '{"type": "object"}'
NAMED = {"name": "x", "schema": A_SCHEMA}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})


def of_openai(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": NAMED | fields}}


def of_tgi(kind: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


def of_vllm(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        (of_openai(), ("json", TEXT, "response_format.json_schema.schema", WHITESPACE, False)),
        (of_openai(strict=False), ("json", TEXT, "response_format.json_schema.schema", WHITESPACE, False)),
        (of_openai(strict=True), ("json", TEXT, "response_format.json_schema.schema", WHITESPACE, True)),
        (
            of_tgi("json_schema", value=NAMED),
            ("json", TEXT, "response_format.value.schema", WHITESPACE, True),
        ),
        (of_tgi("json", value=TEXT), ("json", TEXT, "response_format.value", WHITESPACE, True)),
        (of_tgi("json_object"), ("json", ANY_OBJECT, "response_format")),
        (of_tgi("regex", value="a+"), ("regex", "a+", "response_format.value")),
        (of_tgi("text"), None),
        (
            of_vllm(json=TEXT, whitespace_pattern=" ?", regex=None),
            ("json", TEXT, "structured_outputs.json", " ?"),
        ),
        (
            of_vllm(json_object=True, disable_any_whitespace=True),
            ("json", ANY_OBJECT, "structured_outputs.json_object"),
        ),
        (of_vllm(choice=["a", "b"]), ("choice", '["a", "b"]', "structured_outputs.choice")),
        ({"guided_json": A_SCHEMA, "guided_whitespace_pattern": " "}, ("json", TEXT, "guided_json", " ")),
        (
            {"guided_choice": ["a"], "guided_decoding_backend": "xgrammar"},
            ("choice", '["a"]', "guided_choice"),
        ),
        (
            of_tgi("json_object") | {"guided_whitespace_pattern": " "},
            ("json", ANY_OBJECT, "response_format", " "),
        ),
    ],
)
def test_every_shape_in_which_clients_ask_gives_its_grammar(fields: Any, grammar: Any) -> None:
    assert chat(**fields).grammar() == (grammar and Grammar(*grammar))


KINDS_OF_VLLM = "json, regex, choice, grammar, json_object, structural_tag"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (of_tgi("xml"), "`response_format.type` must be one of"),
        (of_tgi("json_schema"), "`response_format.value` must be an object"),
        (of_openai(schema=False), "`response_format.json_schema.schema` must be an object"),
        (of_tgi("regex"), "`response_format.value` must be a text"),
        (of_vllm(), f"`structured_outputs` must have one of {KINDS_OF_VLLM}. Given: 0"),
        (of_vllm(json={}, regex="a"), f"`structured_outputs` must have one of {KINDS_OF_VLLM}. Given: 2"),
        (of_vllm(structural_tag="x"), "`structured_outputs.structural_tag` is not JSON that can be read: "),
        (of_vllm(regex=""), "`structured_outputs.regex` must be a text that is not empty"),
        (of_vllm(json={}, whitespace_pattern=1), "`structured_outputs.whitespace_pattern` must be a text"),
        (of_vllm(choice=["a", ""]), "`structured_outputs.choice` must be"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "`guided_choice` "),
    ],
)
def test_other_shapes_are_refused_by_their_field(fields: Any, message: str) -> None:
    with pytest.raises(ApiError) as refusal:
        chat(**fields).grammar()
    field = message.split("`")[1]
    assert f"`{field}`" in str(refusal.value) and refusal.value.param == field
    assert message in str(refusal.value)


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def tag(content: Any, begin: Any = "<t>", end: Any = "</t>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


# --- structural tag -----------------------------------------------------------------------------------------

AGE = {"type": "json_schema", "json_schema": {"type": "integer", "maximum": 99}}
DAY = {"begin": "<call=day>", "content": {"type": "any_text"}, "end": "</call>"}
YEAR = {"begin": "<call=year>", "content": AGE, "end": "</call>"}
CALLS = {"type": "triggered_tags", "triggers": ["<call="], "tags": [DAY, YEAR]}
OTHER = {"begin": "[age ", "content": AGE, "end": "]"}
ANY_TEXT = {"type": "any_text"}
YES = {"type": "grammar", "grammar": 'root ::= answer "!"\nanswer ::= "yes" | "no"'}
NESTED = {"type": "grammar", "grammar": 'root ::= "(" root ")" | rule_0\nrule_0 ::= [a-z]'}
ACCEPTED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "const_string", "value": 'a"b'}, ['a"b'], ["", "a", 'a"bc']),
    (ANY_TEXT | {"excludes": [], "max_chars": None, "max_tokens": None}, ["", "a"], []),
    ({"type": "regex", "pattern": r"a/\d\/+"}, ["a/7/"], ["a/", "a7/"]),
    (AGE, ["12", "99"], ["100", "x"]),
    (
        {"type": "tag", "begin": "<t>\n", "content": {"type": "any_text"}, "end": "\n</t>"},
        ["<t>\na\n</t>", "<t>\n\n</t>"],
        ["<t>\na</t>", "<t>\na\\n</t>"],
    ),
    (
        {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": '\x01\t\r\n/"'},
        ['<t>a\x01\t\r\n/"'],
        ["<t>a", "<t>a\x01t\n/"],
    ),
    (
        {**CALLS, "triggers": ["<call=year>\n"], "tags": [{**YEAR, "begin": "<call=year>\n"}]},
        ["<call=year>\n1</call>", "<call=year>"],
        ["a<call=year>\n", "<call=year>\nx"],
    ),
    (tag(regex(".*")), ["<t>abc</t>", "<t></t>"], ["<t>abc", "<t>a</t>b</t>", "<t>\n</t>"]),
    (tag(regex("a|[a-z]+"), end="z"), ["<t>az", "<t>bz"], ["<t>z", "<t>a"]),
    ({**CALLS, "tags": [{**DAY, "end": ""}]}, ["<call=day>x", "a"], ["<call=da"]),
    (
        tag({**CALLS, "tags": [{**DAY, "end": ""}], "stop_after_first": True}),
        ["<t>a<call=day>x</t>", "<t></t>"],
        ["<t><call=day>", "<t><call=day></t></t>"],
    ),
    (
        CALLS,
        [
            "",
            "text",
            "a<call=day>now</call>b<call=year>12</call>",
            "a < b",
            "<call=year>1</call><call=day></call>",
        ],
        ["<call=", "<call=month>1</call>", "a<call=year>x</call>", "<call=year>1</call><call=year>"],
    ),
    (
        {**CALLS, "at_least_one": True},
        ["<call=year>1</call>", "<call=day></call> and <call=year>1</call>."],
        ["", "text", "a<call=year>1</call>"],
    ),
    ({**CALLS, "stop_after_first": True}, ["a<call=year>1</call>", "a"], ["<call=year>1</call>b"]),
    (
        {"type": "triggered_tags", "triggers": ["[", "<call="], "tags": [YEAR, OTHER]},
        ["a[age 3]<call=year>4</call>", "a<call=year>4</call>[age 3]"],
        ["a[<call=year>4</call>", "[age x]", "<call=year>[age 3]</call>", "[age 3] <call=year>]"],
    ),
    (
        {"type": "triggered_tags", "triggers": ["<", "<call="], "tags": [YEAR, tag(AGE, "<b>", "</b>")]},
        ["a<b>1</b><call=year>2</call>c", "<call=year>2</call><b>1</b>"],
        ["a<b", "a<c", "<call=day>"],
    ),
    (
        {"type": "tag", "begin": "{", "content": CALLS, "end": "}"},
        ["{}", "{a}", "{a<call=year>4</call>b}"],
        ["{", "{}b", "{<call=}</call>}"],
    ),
    ({"type": "grammar", "grammar": r"root ::= [+\-\\]+"}, ["+-", "\\"], ["", "x"]),
    (one_of(sequence(YES, NESTED), NESTED), ["yes!((a))", "(b)", "c"], ["yes!", "((a)", "yes!yes!"]),
    (sequence(tag(ANY_TEXT, "", ": "), YES), ["so: no!", ": yes!"], ["so no!"]),
    (tag(ANY_TEXT, end=["</a>", "</b>"]), ["<t>x</a>", "<t>a</b>"], ["<t>x</c>", "<t></a></b>"]),
    (
        tag({**CALLS, "at_least_one": True, "stop_after_first": True}),
        ["<t><call=year>1</call></t>"],
        ["<t></t>", "<t>a<call=year>1</call></t>"],
    ),
]


def compile_format(form: Any) -> str:
    grammar = read_response_format({"type": "structural_tag", "format": form}, "f")
    assert grammar is not None
    return compile_checked(grammar)


@pytest.mark.parametrize(("form", "right", "wrong"), ACCEPTED)
def test_texts_of_a_format_and_others(form: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    source = compile_format(form)
    assert [text for text in right if not accepts(source, text)] == []
    assert [text for text in wrong if accepts(source, text)] == []


def test_the_older_form_and_vllms_structured_outputs_mean_the_same() -> None:
    structure = {"begin": "<call=year>", "schema": AGE["json_schema"], "end": "</call>"}
    older = {"type": "structural_tag", "structures": [structure], "triggers": ["<call="]}
    newer = {"type": "structural_tag", "format": {**CALLS, "tags": [YEAR]}}
    grammars = [read_response_format(older), read_response_format(newer)]
    grammars += [read_structured_outputs({"structural_tag": value}) for value in (json.dumps(older), newer)]
    assert len({compile_checked(grammar) for grammar in grammars if grammar}) == 1 and None not in grammars
    wrong = read_response_format(older | {"triggers": ["x"]})
    with pytest.raises(
        ApiError, match="`response_format` cannot be compiled: `begin` must begin with one of `triggers`"
    ):
        assert wrong is not None and compile_checked(wrong)


def test_white_space_in_a_tags_json_is_as_asked_for() -> None:
    form = {"format": tag({"type": "json_schema", "json_schema": {"type": "object"}})}
    grammar = read_structured_outputs({"structural_tag": form, "whitespace_pattern": r"\t*"})
    assert grammar is not None
    source = compile_checked(grammar)
    texts = ["<t>{\t\t}</t>", "<t>{ }</t>"]
    assert [accepts(source, one) for one in texts] == [True, False]


async def test_tags_may_be_special_tokens() -> None:
    """The bundled model's `<|im_start|>` stands for such a tag: its text is no text to the engine."""
    age = {"begin": "<|im_start|>x=", "content": AGE, "end": "<|im_end|>"}
    form = {"type": "triggered_tags", "triggers": ["<|im_start|>"], "tags": [age]}
    grammar = read_response_format({"type": "structural_tag", "format": form})
    assert grammar is not None
    path = str(model_files.resolve("smollm2") / "tokenizer.json")
    known = llguidance.LLTokenizer(path, eos_token=0)
    source = await compile_grammar(grammar, model_tokenizer())
    number = [*known.tokenize_str("x=1"), *known.tokenize_str("2")]
    hello = known.tokenize_str("hello")
    assert accepts(source, [*hello, 1, *number, 2, *hello], known)
    assert accepts(source, hello, known)
    assert not accepts(source, [*hello, 1, *number], known)
    assert not accepts(source, [*hello, 1, *hello], known)


OTHERS = ("tags_with_separator", "qwen_xml", "qwen_xml_parameter", "dispatch", "token_dispatch", "x" * 999)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "regex", "pattern": "a", "excludes": ["a"]}, "`excludes` is not supported. Given: ['a']"),
        ({"type": "const_string"}, "a format of type 'const_string' is not served: {"),
        (sequence(), "a format of type 'sequence' is not served: {"),
        (sequence(CALLS, CALLS), "free text has no end"),
        (tag({**CALLS, "tags": [{**DAY, "end": ""}]}), "free text has no end"),
        (tag(regex("a)(b")), ""),
        (tag({}), "a format of type None is not served: {}"),
        (tag(3), "a part must be an object, and its `begin` a text. Given: 3"),
        (
            {"type": "json_schema", "json_schema": {"not": {}}},
            'at 2(9): failed to compile JSON schema: Unimplemented keys: ["not"]',
        ),
        (AGE | {"json_schema": False}, "a format of type 'json_schema' is not served: {"),
        (tag(AGE, {"type": "token", "token": "a"}), "a part must be an object, and its `begin` a text"),
        (tag(AGE, "a", {"type": "token", "token": "a"}), "`end` must be a text, or a list of texts"),
        ({"type": "any_text", "max_tokens": 9}, "`max_tokens` is not supported. Given: 9"),
        (ANY_TEXT | {"max_chars": -1}, "`max_chars` is not supported"),
        (CALLS | {"triggers": ["x"]}, "`begin` must begin with one of `triggers`"),
        ({"type": "grammar", "grammar": "root ::= a"}, "Rule 'a' not"),
        ({"type": "grammar", "grammar": "root ::= " + 999 * "("}, "maximum recursion depth exceeded"),
        (AGE | {"style": "qwen_xml"}, "`style` is not supported. Given: 'qwen_xml'"),
        (AGE | {"any_order": True}, "`any_order` is not supported"),
        *(
            (tag(sequence({"type": kind, "content": AGE})), f"a format of type '{kind[:180]}")
            for kind in OTHERS
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refusal:
        compile_format(form)
    assert str(refusal.value).startswith(f"`f` cannot be compiled: {message}") and refusal.value.param == "f"
    assert len(str(refusal.value)) < 500
