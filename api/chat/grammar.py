"""Grammar of a chat's answer: its structured output, the calls that it must have, and reasoning before."""

import json

from api.chat.tools import ToolChoice
from api.structured_output.grammar import CompiledGrammar, Grammar, compile_grammar
from api.tokenizer import ModelTokenizer
from api.tool_calls.forcing.grammar import CallChoice, after_thinking, call_grammar, named
from api.tool_calls.formats.table import CALL_FORMATS
from api.tool_calls.reasoning import REASONING_FORMATS
from common.messages.answer import Reading


async def answer_grammar(
    grammar: Grammar | None, tools: ToolChoice | None, reading: Reading | None, tokenizer: ModelTokenizer
) -> Grammar | CompiledGrammar | None:
    """What the answer must look like: where it is no call of a tool, as `grammar` says; None for anything.
    Raises ApiError.
    """
    if reading is None:
        return grammar
    calls = "" if tools is None else await forced_calls(tools, grammar, reading, tokenizer)
    if grammar is None or (tools is not None and tools.is_forced):
        return CompiledGrammar(calls, "tools") if calls else None
    reasoning = REASONING_FORMATS.get(reading.reasoning)
    source = await compile_grammar(grammar, tokenizer)
    form = CALL_FORMATS.get(reading.calls)
    text = after_thinking(source, reasoning, reading.prompt_end, tokenizer.special_tokens, form)
    return CompiledGrammar(either(calls, text) if calls else text, grammar.field)


async def forced_calls(
    tools: ToolChoice, grammar: Grammar | None, reading: Reading, tokenizer: ModelTokenizer
) -> str:
    """The grammar of an answer's calls; "" where nothing is forced. With a grammar for all other answers,
    this one is of those that call.
    """
    return await call_grammar(
        CALL_FORMATS[reading.calls],
        tools.callable,
        CallChoice(tools.is_forced or grammar is not None, tools.parallel and not tools.is_named),
        tokenizer.special_tokens,
        REASONING_FORMATS.get(reading.reasoning),
        reading.prompt_end,
    )


def either(calls: str, text: str) -> str:
    """The grammar of answers that match one of two."""
    start = {"lark_grammar": "start: @calls | @text"}
    return json.dumps({"grammars": [start, *named(calls, "calls"), *named(text, "text")]})
