"""Under its grammar a model without sense calls functions that exist, with arguments of their schema."""

import asyncio
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

from api.answers.call_formats import CALL_FORMATS, REASONING_FORMATS, ReasoningFormat
from api.answers.call_readers import PAIR, PARAMETER
from api.answers.scanner import Tool
from api.errors import ApiError
from api.grammar.compile import Grammar, compile_grammar
from api.grammar.force import CallChoice, after_thinking, call_grammar
from common import model_files
from tests.support.tool_calls import SCHEMA, Answer, Reading

ENDINGS = ('"', "}", "]", ")", "1", "true")
"""Tokens that bring values to their end."""
MAX_TOKENS = 400


class Walker:
    """Walks through grammars with a model's tokens."""

    def __init__(self, directory: Path, special_ids: Mapping[str, int]) -> None:
        self.vocabulary = vocabulary(directory)
        self.marks = {token: mark.encode() for mark, token in special_ids.items()}
        encoded = [self.vocabulary.tokenize_str(text) for text in ENDINGS]
        self.endings = np.array([*(ids[0] for ids in encoded if len(ids) == 1), *self.marks])

    def walk(self, source: str, seed: int, *marks: str) -> str:
        """The text of a walk to the grammar's end. Marks that must come are tried now and then, since chance
        would not find them.
        """
        random = Random(seed)
        matcher = llguidance.LLMatcher(self.vocabulary, source, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens: list[int] = []
        while not matcher.is_stopped():
            assert len(tokens) < MAX_TOKENS, self.text(tokens)
            ahead = (
                self.vocabulary.tokenize_str(random.choice(marks)) if marks and random.random() < 0.2 else []
            )
            if not ahead or matcher.validate_tokens(ahead) < len(ahead):
                ahead = [self.step(matcher, random)]
            if ahead[0] == self.vocabulary.eos_token:
                break
            assert matcher.consume_tokens(ahead), matcher.get_error()
            tokens += ahead
        return self.text(tokens)

    def step(self, matcher: llguidance.LLMatcher, random: Random) -> int:
        mask = allocate_token_bitmask(1, self.vocabulary.vocab_size)
        fill_next_token_bitmask(matcher, mask)
        allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
        if allowed[self.vocabulary.eos_token] and random.random() < 0.5:
            return self.vocabulary.eos_token
        endings = self.endings[allowed[self.endings] != 0]
        found = endings if len(endings) and random.random() < 0.5 else np.flatnonzero(allowed)
        assert len(found), matcher.get_error()
        return int(found[random.randrange(len(found))])

    def text(self, tokens: list[int]) -> str:
        pieces = [self.marks.get(token) or self.vocabulary.decode_bytes([token]) for token in tokens]
        return b"".join(pieces).decode(errors="replace")


@functools.cache
def vocabulary(directory: Path) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(str(directory / "tokenizer.json"))


DIRECTORY = model_files.resolve("smollm2")
WEATHER = Tool("weather", SCHEMA | {"required": ["city", "units", "days"]}, strict=True)
TOOLS = (
    WEATHER,
    Tool("now", {"type": "object", "properties": {}}),
    Tool("maybe", {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "boolean"}}}),
    Tool("bare", {}),
)
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
QWEN = REASONING_FORMATS["qwen3"]
ONE = CallChoice(is_required=True, is_parallel=False)
FIRST_SPECIAL = 3
"""The id of the first special token that stands for a mark."""


def special_ids(*marks: str) -> Mapping[str, int]:
    return {mark: FIRST_SPECIAL + i for i, mark in enumerate(marks)}


def grammar(name: str, choice: CallChoice, ids: Mapping[str, int], tools: tuple[Tool, ...] = TOOLS) -> str:
    return asyncio.run(call_grammar(CALL_FORMATS[name], tools, choice, ids))


def walk(name: str, choice: CallChoice, ids: Mapping[str, int], seed: int) -> Answer:
    form = CALL_FORMATS[name]
    marks = [mark for mark in (PARAMETER.end, PAIR.end) if mark not in ids]
    text = Walker(DIRECTORY, ids).walk(grammar(name, choice, ids), seed, *marks)
    return Reading(form, tools=TOOLS).read(text)


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("are_special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_required_call_is_valid(name: str, are_special: bool) -> None:
    ids = special_ids(*CALL_FORMATS[name].marks) if are_special or name == "openai" else {}
    answer = walk(name, CallChoice(is_required=True), ids, 0)
    assert answer.calls and not answer.content
    check(answer.calls)
    answer = walk(name, ONE, ids, 1)
    assert len(answer.calls) == 1
    check(answer.calls)


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_with_a_strict_function_text_is_free_and_calls_are_valid(name: str) -> None:
    ids = special_ids(*CALL_FORMATS[name].marks)
    answer = walk(name, CallChoice(is_required=False), ids, 0)
    check([call for call in answer.calls if call[0] == WEATHER.name])


def accepts(source: str, text: str, marks: tuple[str, ...] = ()) -> bool:
    """Whether a text can begin so."""
    vocabulary = Walker(DIRECTORY, {}).vocabulary
    tokens = vocabulary.tokenize_str(text)
    if marks:
        before, _, after = text.partition(marks[0])
        inner = [FIRST_SPECIAL, *vocabulary.tokenize_str(after)] if after else []
        tokens = [*vocabulary.tokenize_str(before), *inner]
    matcher = llguidance.LLMatcher(vocabulary, source, log_level=0)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens))


def test_nothing_is_forced_without_need_where_a_call_cannot_be_written() -> None:
    spaced = Tool("f", {"type": "object", "properties": {"my name": {"type": "string"}}})
    assert grammar("pythonic", CallChoice(is_required=False), {}, (spaced,)) == ""
    with pytest.raises(ApiError, match="`properties/my name` is not supported"):
        grammar("pythonic", ONE, {}, (spaced,))


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "tgi"])
@pytest.mark.parametrize("is_required", [False, True])
def test_a_strict_functions_schema_is_refused_by_name(name: str, is_required: bool) -> None:
    strict = Tool("f", {"type": "object", "properties": {"a": {"not": {}}}}, strict=True)
    with pytest.raises(ApiError, match=r"`tools\.f\.parameters` .* `not` \(at `#/properties/a/not`\)"):
        grammar(name, CallChoice(is_required), {}, (TOOLS[1], strict))


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
    assert not accepts(source, '<tool_call>\n{"name": "f", "arguments": [')
    assert accepts(source, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')


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
        text = Walker(DIRECTORY, {}).walk(grammar("tgi", ONE, {}, (tool,)), seed)
        [(name, arguments)] = Reading(CALL_FORMATS["tgi"]).read(text).calls
        assert name == "f"
        jsonschema.validate(json.loads(arguments), schema)


# --- after thinking -----------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
JSON = Grammar("json", '{"type": "object", "properties": {"a": {"type": "null"}}}', "f")


def forced_after(form: ReasoningFormat | None, prompt: str) -> str:
    return asyncio.run(call_grammar(CALL_FORMATS["hermes"], TOOLS, ONE, {}, form, prompt))


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
    assert accepts(forced_after(QWEN, prompt), text) == is_accepted


KINDS = [JSON, Grammar("regex", r'\{"a":null\}', "f"), Grammar("choice", '["{\\"a\\":null}"]', "f")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_structured_output_begins_after_thinking(kind: Grammar) -> None:
    source = asyncio.run(compile_grammar(kind))
    within = after_thinking(source, QWEN, "<think>\n", {})
    assert accepts(within, 'Maybe {x}.</think>\n{"a":null}')
    assert not accepts(within, "Maybe.</think>\nno")
    assert accepts(after_thinking(source, QWEN, "", {}), '{"a":null}')
    assert after_thinking(source, QWEN, "<think></think>", {}) == source
    assert after_thinking(source, None, "", {}) == source


def test_in_harmony_structured_output_is_the_final_message() -> None:
    source = asyncio.run(compile_grammar(JSON))
    form = CALL_FORMATS["openai"]
    ids = special_ids(*form.marks)
    for seed in range(2):
        text = Walker(DIRECTORY, ids).walk(after_thinking(source, None, "", ids, form), seed)
        assert isinstance(json.loads(Reading(form).read(text).content), dict)
