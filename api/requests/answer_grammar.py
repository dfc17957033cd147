"""Grammar of a chat's answer: reasoning first, then structured output or calls."""

import functools
import json
from dataclasses import replace

from api.answers.answer import Reading
from api.answers.call_formats import CALL_FORMATS, HARMONY, REASONING_FORMATS
from api.grammar.apart import run_apart
from api.grammar.check import can_begin
from api.grammar.compile import CompiledGrammar, Grammar, compile_grammar
from api.grammar.force import CallChoice, after_thinking, call_grammar, either
from api.prompts.tokenizer import ModelTokenizer
from api.requests.tools import ToolChoice

ANY_NAME = '{"any name'


async def reading_beside(
    grammar: Grammar | None, tools: ToolChoice | None, reading: Reading, tokenizer: ModelTokenizer
) -> Reading:
    """How an answer is read when the client gives a grammar beside tools: it is calls, or what the grammar
    describes. If the grammar describes the very object that a call without a mark is, the answer is never a
    call. Raises ApiError.
    """
    if grammar is None or tools is None or tools.is_forced or reading.calls == HARMONY:
        return reading
    form = CALL_FORMATS.get(reading.calls)
    heads = [head % json.dumps(tool.name) for head in (form.heads if form else ()) for tool in tools.callable]
    if heads:
        source = await compile_grammar(replace(grammar, closed=True), tokenizer)
        if await run_apart(grammar.field, names_of_call, source, tuple(heads), tokenizer.size):
            return replace(reading, calls="")
    return replace(reading, is_either=True)


@functools.lru_cache(maxsize=64)
def names_of_call(source: str, heads: tuple[str, ...], size: int) -> bool:
    """Whether objects of a grammar may begin as calls do, but not with any other name."""
    return not can_begin(source, ANY_NAME, size) and any(can_begin(source, head, size) for head in heads)


async def answer_grammar(
    grammar: Grammar | None, tools: ToolChoice | None, reading: Reading | None, tokenizer: ModelTokenizer
) -> Grammar | CompiledGrammar | None:
    """What the answer must look like: calls of tools, or what `grammar` describes; None for anything. Raises
    ApiError.
    """
    if reading is None:
        return grammar
    form, reasoning = CALL_FORMATS.get(reading.calls), REASONING_FORMATS.get(reading.reasoning)
    prompt, calls = reading.prompt_end, ""
    if tools is not None and form is not None:
        must_call = tools.is_forced or grammar is not None  # all other answers are those of `grammar`
        choice = CallChoice(must_call, tools.parallel and not tools.is_named)
        ids = tokenizer.special_tokens
        calls = await call_grammar(form, tools.callable, choice, ids, reasoning, prompt)
    if grammar is None or (tools is not None and tools.is_forced):
        return CompiledGrammar(calls, "tools") if calls else None
    source = await compile_grammar(grammar, tokenizer)
    text = after_thinking(source, reasoning, prompt, tokenizer.special_tokens, form)
    return CompiledGrammar(either(calls, text) if calls else text, grammar.field)
