"""Grammars of answers: what they may be, where the client says something of calls, of text, or of both."""

import json
from dataclasses import replace

import llguidance
import pytest

from api.answers.answer import Reading
from api.grammar.check import byte_tokenizer
from api.grammar.compile import CompiledGrammar, Grammar
from api.requests.answer_grammar import answer_grammar, reading_beside
from api.requests.tools import FunctionSchema, ToolChoice, ToolSchema, read_tools
from tests.support.tokenizer import model_tokenizer

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FORMAT = Grammar("json", '{"type": "array", "items": {"type": "boolean"}}', "response_format")
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
WRONG_CALL = CALL.replace("1", '"a"')
FITS = "[true, false]"
THOUGHT = "<think>\nHm. [maybe]\n</think>\n\n"
TEXT = "Hello."


def tools(choice: str = "auto", strict: bool = False) -> ToolChoice | None:
    function = FunctionSchema(name="f", parameters=SCHEMA, strict=strict)
    return read_tools([ToolSchema(type="function", function=function)], choice, False)


async def accepted(grammar: Grammar | None, choice: ToolChoice | None, reasoning: str = "") -> set[str]:
    """Those of the texts that are whole answers; all, where nothing is forced."""
    reading = Reading(calls="hermes" if choice else "", reasoning=reasoning)
    texts = {CALL, WRONG_CALL, FITS, TEXT, THOUGHT + CALL, THOUGHT + FITS}
    found = await answer_grammar(grammar, choice, reading, model_tokenizer())
    if found is None:
        return texts
    assert isinstance(found, CompiledGrammar)
    return {text for text in texts if matches(found.source, text)}


def matches(source: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(byte_tokenizer(), source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


async def test_nothing_is_forced_where_nothing_shows_a_call() -> None:
    assert await answer_grammar(None, tools(), Reading(calls="llama3_json"), model_tokenizer()) is None
    assert await answer_grammar(FORMAT, None, None, model_tokenizer()) == FORMAT


@pytest.mark.parametrize("grammar", [None, FORMAT])
async def test_required_calls_are_all_there_is(grammar: Grammar | None) -> None:
    assert await accepted(grammar, tools("required")) == {CALL}
    assert await accepted(grammar, tools("f"), "qwen3") == {CALL, THOUGHT + CALL}


async def test_a_strict_function_is_called_right_or_not_at_all() -> None:
    assert await accepted(None, tools(strict=True)) == {CALL, FITS, TEXT, THOUGHT + CALL, THOUGHT + FITS}


async def test_text_that_calls_nothing_has_the_response_format() -> None:
    assert await accepted(FORMAT, tools()) == {CALL, FITS}
    assert await accepted(FORMAT, tools(), "qwen3") == {CALL, FITS, THOUGHT + CALL, THOUGHT + FITS}
    assert await accepted(FORMAT, None, "qwen3") == {FITS, THOUGHT + FITS}


def of_object(**properties: str) -> Grammar:
    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in properties.items()}}
    return Grammar("json", json.dumps(schema), "response_format")


@pytest.mark.parametrize("form", ["llama3_json", "tgi"])
async def test_an_object_with_the_properties_of_a_call_is_none(form: str) -> None:
    """A client that asks for just such an object does not mean a call; one that takes any object may."""
    reading = Reading(calls=form)
    like_calls = of_object(name="string", parameters="object", function="object")
    others = [of_object(name="string", age="integer"), Grammar("json", "{}", "f"), FORMAT]
    assert await reading_beside(like_calls, tools(), reading, model_tokenizer()) == Reading()
    for grammar in others:
        found = await reading_beside(grammar, tools(), reading, model_tokenizer())
        assert found == replace(reading, is_either=True)
    for choice in (None, tools("required"), tools("f")):
        assert await reading_beside(like_calls, choice, reading, model_tokenizer()) == reading
    assert await reading_beside(None, tools(), reading, model_tokenizer()) == reading
    forced = await answer_grammar(like_calls, tools(), Reading(), model_tokenizer())
    assert isinstance(forced, CompiledGrammar) and not matches(forced.source, CALL)
    assert matches(forced.source, '{"name": "f", "parameters": {}}')
