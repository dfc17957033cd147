"""Forced calls: the grammar of an answer with calls in the model's format, and of thinking before it."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from api.answers.call_formats import HARMONY, CallFormat, ReasoningFormat
from api.answers.scanner import Tool
from api.errors import ApiError, cut, invalid
from api.grammar.apart import run_apart
from api.grammar.call_rules import (
    CALL_RULES,
    CallsRule,
    ForcedTools,
    field_of,
    forced_schema,
    harmony_answer,
    harmony_final,
)
from api.grammar.check import find_error
from api.grammar.compile import MAX_GRAMMAR_BYTES
from api.grammar.lark import TEXT, Lark, escaped

LINES = r"/\n{0,2}/"
"""White space between thinking and what follows it."""


@dataclass(frozen=True, slots=True)
class CallChoice:
    """What a request says about calls.

    Attributes:
        is_required: the answer has a call.
        is_parallel: it may have several.
    """

    is_required: bool
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class Thinking:
    """The thinking with which an answer begins.

    Attributes:
        form: None where the answer does not begin with thinking.
        begins_inside: the answer begins inside of it.
    """

    form: ReasoningFormat | None = None
    begins_inside: bool = False


def thinking_after(form: ReasoningFormat | None, prompt: str) -> Thinking:
    """The thinking that an answer to this prompt may begin with."""
    if form is None or form.is_closed(prompt):
        return Thinking()
    return Thinking(form, form.begins_inside(prompt))


async def call_grammar(
    calls: CallFormat,
    tools: Sequence[Tool],
    choice: CallChoice,
    special_ids: Mapping[str, int],
    reasoning: ReasoningFormat | None = None,
    prompt: str = "",
) -> str:
    """The grammar, in llguidance's form, of an answer that may call these functions; "" if nothing is forced.
    Raises ApiError (422) that names the function, the keyword at fault and its place.

    If no call is required and no function is strict, a call is forced only after the mark with which it
    begins. Nothing is forced then in formats without a mark, or if the grammar cannot be compiled.

    Args:
        special_ids: ids of the model's special tokens, by their texts.
        prompt: at least its end.
    """
    key = json.dumps([[tool.name, tool.parameters, tool.strict] for tool in tools])
    if len(key) > MAX_GRAMMAR_BYTES:
        raise invalid(f"`tools` must have at most {MAX_GRAMMAR_BYTES} characters. Given: {len(key)}", "tools")
    thinking = thinking_after(reasoning, prompt)
    marks = {*calls.marks, *(thinking.form.marks if thinking.form else ())}
    ids = tuple((mark, special_ids[mark]) for mark in sorted(marks) if mark in special_ids)
    try:
        return await run_apart("tools", compile_calls, calls.name, key, choice, ids, thinking)
    except ApiError:
        if must_be_forced(tools, choice):
            raise
        return ""


@functools.lru_cache(maxsize=64)
def compile_calls(
    name: str, key: str, choice: CallChoice, ids: tuple[tuple[str, int], ...], thinking: Thinking
) -> str:
    tools = [Tool(*fields) for fields in json.loads(key)]
    is_promised = must_be_forced(tools, choice)
    forced = ForcedTools([(tool, forced_schema(tool)) for tool in tools], choice.is_parallel)
    try:
        if not is_promised and (name == HARMONY or not CALL_RULES[name](Lark(dict(ids)), forced).mark):
            return ""  # nothing says where free text ends and a call begins
        check_calls(tools, call_source(name, Lark({}), forced, choice, thinking))
    except ApiError:
        if is_promised:
            raise
        return ""
    return call_source(name, Lark(dict(ids)), forced, choice, thinking)


def must_be_forced(tools: Sequence[Tool], choice: CallChoice) -> bool:
    """Whether a client relies on calls that match their schemas."""
    return choice.is_required or any(tool.strict for tool in tools)


def check_calls(tools: Sequence[Tool], source: str) -> None:
    """Raises ApiError if a grammar without special tokens cannot be served."""
    if cause := find_error(source):
        field = field_of(tools[0]) if len(tools) == 1 else "tools"
        raise invalid(f"`{field}` cannot be compiled: {cut(cause)}", field)


def call_source(name: str, lark: Lark, forced: ForcedTools, choice: CallChoice, thinking: Thinking) -> str:
    """The grammar of an answer in the call format `name`."""
    if name == HARMONY:
        return lark.source(harmony_answer(lark, forced, choice.is_required))
    calls = CALL_RULES[name](lark, forced)
    required = f"{lark.mark(calls.mark)} {calls.rest}" if calls.mark else calls.rest
    body = required if choice.is_required else optional_calls(lark, calls, choice.is_parallel)
    return lark.source(f"{thinking_rule(lark, thinking)} {lark.rule(body)}")


def optional_calls(lark: Lark, calls: CallsRule, is_parallel: bool) -> str:
    """Text with calls after their marks; in a format without a mark, either text or calls."""
    if not calls.mark:
        other = lark.rule(rf"/[^\s{escaped(calls.first)}](.|\n)*/")
        return f"({other} | {calls.rest})?"
    found = f"{lark.until(calls.mark)} {calls.rest}"
    text = lark.rule(TEXT)
    return f"({found})* {text}" if is_parallel else f"{found} | {text}"


def thinking_rule(lark: Lark, thinking: Thinking) -> str:
    """The rule of the thinking before an answer, and of the white space after it."""
    if thinking.form is None:
        return ""
    open, rest = lark.mark(thinking.form.open), f"{lark.until(thinking.form.close)} {LINES}"
    if not thinking.begins_inside:
        return f"({open} {rest})?"
    return f"({open})? {rest}" if thinking.form.open in lark.special_ids else rest


def after_thinking(
    source: str,
    reasoning: ReasoningFormat | None,
    prompt: str,
    special_ids: Mapping[str, int],
    calls: CallFormat | None = None,
) -> str:
    """The grammar of thinking and an answer, from the grammar of the answer. In Harmony, the answer is the
    final message.
    """
    lark, thinking = Lark(special_ids), thinking_after(reasoning, prompt)
    if calls is not None and calls.name == HARMONY:
        return lark.source(harmony_final(lark, lark.nest(source, "answer")))
    if thinking.form is None:
        return source
    return lark.source(f"{thinking_rule(lark, thinking)} {lark.nest(source, 'answer')}")


def either(calls: str, text: str) -> str:
    """The grammar of answers that match one of two."""
    lark = Lark({})
    return lark.source(f"{lark.nest(calls, 'calls')} | {lark.nest(text, 'text')}")
