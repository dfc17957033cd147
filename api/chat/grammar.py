"""Grammar of a chat's answer: its structured output, the calls that it must have, and reasoning before."""

import functools
import json
from dataclasses import replace

from api.chat.tools import ToolChoice
from api.event_loop.offload import LONG, offload
from api.structured_output.check import can_begin
from api.structured_output.grammar import CompiledGrammar, Grammar, compile_grammar
from api.tokenizer import ModelTokenizer
from api.tool_calls.forcing.grammar import CallChoice, after_thinking, call_grammar, named
from api.tool_calls.formats.harmony import HARMONY
from api.tool_calls.formats.table import CALL_FORMATS
from api.tool_calls.reasoning import REASONING_FORMATS
from common.messages.answer import Reading

ANY_NAME = '{"any name'


async def reading_beside(
    grammar: Grammar | None, tools: ToolChoice | None, reading: Reading, tokenizer: ModelTokenizer
) -> Reading:
    """How an answer is read of which the client says what it must look like: it is that, or calls. Where that
    is an object whose schema has the very properties of a call without a mark, it is never a call. Raises
    ApiError.
    """
    if grammar is None or tools is None or tools.is_forced or reading.calls == HARMONY:
        return reading
    form = CALL_FORMATS.get(reading.calls)
    heads = [head % json.dumps(tool.name) for head in (form.heads if form else ()) for tool in tools.callable]
    if heads:
        source = await compile_grammar(replace(grammar, closed=True), tokenizer)
        if await offload(LONG, lambda: names_of_call(source, tuple(heads), tokenizer.size)):
            return replace(reading, calls="")
    return replace(reading, is_either=True)


@functools.lru_cache(maxsize=64)
def names_of_call(source: str, heads: tuple[str, ...], size: int) -> bool:
    """Whether objects of a grammar may begin as calls do, but not with just any name."""
    return not can_begin(source, ANY_NAME, size) and any(can_begin(source, head, size) for head in heads)


async def answer_grammar(
    grammar: Grammar | None, tools: ToolChoice | None, reading: Reading | None, tokenizer: ModelTokenizer
) -> Grammar | CompiledGrammar | None:
    """What the answer must look like: where it is no call of a tool, as `grammar` says; None for anything.
    Raises ApiError.
    """
    if reading is None:
        return grammar
    calls = (
        "" if tools is None or not reading.calls else await forced_calls(tools, grammar, reading, tokenizer)
    )
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
