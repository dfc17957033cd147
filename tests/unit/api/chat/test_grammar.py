"""Grammars of answers: what they may be, where the client says something of calls, of text, or of both."""

import llguidance
import pytest

from api.chat.grammar import answer_grammar
from api.chat.tools import FunctionSchema, ToolChoice, ToolSchema, read_tools
from api.structured_output.grammar import CompiledGrammar, Grammar
from api.structured_output.vocabulary import byte_vocabulary
from common.messages.answer import Reading
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
    matcher = llguidance.LLMatcher(byte_vocabulary(), source, log_level=0)
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
