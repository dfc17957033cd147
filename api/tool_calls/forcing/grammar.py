"""Grammars that force calls in the format in which the model writes them, and answers after its thinking."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.errors import ApiError, cut, invalid
from api.event_loop.offload import LONG, offload
from api.structured_output.check import error_of
from api.structured_output.grammar import MAX_GRAMMAR_BYTES
from api.structured_output.lark import TEXT, Lark, escaped
from api.tool_calls.forcing.harmony_rules import harmony_answer, harmony_final
from api.tool_calls.forcing.offer import CallsRule, Offer
from api.tool_calls.forcing.rules import RULES
from api.tool_calls.forcing.schemas import field_of, forced_schema
from api.tool_calls.formats.harmony import HARMONY
from api.tool_calls.formats.table import CallFormat
from api.tool_calls.reading.deltas import Tool
from api.tool_calls.reasoning import ReasoningFormat

SPACE = r"/\n{0,2}/"


@dataclass(frozen=True, slots=True)
class CallChoice:
    """What a request says of calls.

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
        is_open: the answer begins inside of it.
    """

    form: ReasoningFormat | None = None
    is_open: bool = False


def thinking_after(form: ReasoningFormat | None, prompt: str) -> Thinking:
    """The thinking that an answer to this prompt may begin with."""
    if form is None or form.is_closed(prompt):
        return Thinking()
    return Thinking(form, form.is_open(prompt))


async def call_grammar(
    calls: CallFormat,
    tools: Sequence[Tool],
    choice: CallChoice,
    special_ids: Mapping[str, int],
    reasoning: ReasoningFormat | None = None,
    prompt: str = "",
) -> str:
    """The grammar, in llguidance's form, of an answer that may call these functions; "" if nothing is forced.

    Where no call is required and no function is strict, calls are forced from the mark with which they begin;
    not in formats without one, and not if the grammar cannot be compiled. Raises ApiError (422) that names
    the function, the keyword at fault and its place.

    `special_ids` are the ids of the model's special tokens, by their texts; `prompt` is its end at least.
    """
    key = json.dumps([[tool.name, tool.parameters, tool.strict] for tool in tools])
    if len(key) > MAX_GRAMMAR_BYTES:
        raise invalid(f"`tools` must have at most {MAX_GRAMMAR_BYTES} characters. Given: {len(key)}", "tools")
    thinking = thinking_after(reasoning, prompt)
    marks = {*calls.marks, *(thinking.form.marks if thinking.form else ())}
    ids = tuple((mark, special_ids[mark]) for mark in sorted(marks) if mark in special_ids)
    return await offload(LONG, lambda: compile_calls(calls.name, key, choice, ids, thinking))


@functools.lru_cache(maxsize=64)
def compile_calls(
    name: str, key: str, choice: CallChoice, ids: tuple[tuple[str, int], ...], thinking: Thinking
) -> str:
    tools = [Tool(*fields) for fields in json.loads(key)]
    is_promised = choice.is_required or any(tool.strict for tool in tools)
    offer = Offer([(tool, forced_schema(tool)) for tool in tools], choice.is_parallel)
    if not is_promised and not has_mark(name, Lark(dict(ids)), offer):
        return ""
    try:
        check(tools, answer(name, Lark({}), offer, choice, thinking))
    except ApiError:
        if is_promised:
            raise
        return ""
    return answer(name, Lark(dict(ids)), offer, choice, thinking)


def has_mark(name: str, lark: Lark, offer: Offer) -> bool:
    """Whether calls begin with a mark, so that text is free up to it."""
    return name != HARMONY and RULES[name](lark, offer).mark != ""


def check(tools: Sequence[Tool], source: str) -> None:
    """Raises ApiError if a grammar without special tokens cannot be compiled."""
    if cause := error_of(source):
        field = field_of(tools[0]) if len(tools) == 1 else "tools"
        raise invalid(f"`{field}` cannot be compiled: {cut(cause)}", field)


def answer(name: str, lark: Lark, offer: Offer, choice: CallChoice, thinking: Thinking) -> str:
    if name == HARMONY:
        return lark.source(harmony_answer(lark, offer, choice.is_required))
    calls = RULES[name](lark, offer)
    required = f"{lark.mark(calls.mark)} {calls.rest}" if calls.mark else calls.rest
    body = required if choice.is_required else optional(lark, calls, choice.is_parallel)
    return lark.source(f"{thought(lark, thinking)} {lark.rule(body)}")


def optional(lark: Lark, calls: CallsRule, is_parallel: bool) -> str:
    """Text, with calls in it wherever they begin by their mark, or in its place if they have none."""
    if not calls.mark:
        other = lark.rule(rf"/[^\s{escaped(calls.first)}](.|\n)*/")
        return f"({other} | {calls.rest})?"
    found = f"{lark.until(calls.mark)} {calls.rest}"
    text = lark.rule(TEXT)
    return f"({found})* {text}" if is_parallel else f"{found} | {text}"


def thought(lark: Lark, thinking: Thinking) -> str:
    """The rule of the thinking before an answer, and of the white space behind it."""
    if thinking.form is None:
        return ""
    open, rest = lark.mark(thinking.form.open), f"{lark.until(thinking.form.close)} {SPACE}"
    if not thinking.is_open:
        return f"({open} {rest})?"
    return f"({open})? {rest}" if thinking.form.open in lark.special_ids else rest


def after_thinking(
    source: str,
    reasoning: ReasoningFormat | None,
    prompt: str,
    special_ids: Mapping[str, int],
    calls: CallFormat | None = None,
) -> str:
    """A grammar that was compiled for a whole answer, as one for what follows the model's thinking; in
    Harmony, which is thinking and calls in one, for the final message.
    """
    lark, thinking = Lark(special_ids), thinking_after(reasoning, prompt)
    if calls is not None and calls.name == HARMONY:
        start = harmony_final(lark, "@answer")
    elif thinking.form is not None:
        start = f"{thought(lark, thinking)} @answer"
    else:
        return source
    return json.dumps({"grammars": [{"lark_grammar": lark.source(start)}, *named(source, "answer")]})


def named(source: str, name: str) -> list[dict[str, Any]]:
    """The grammars of llguidance's form, JSON or Lark; the first of them has this name."""
    is_json = source.lstrip().startswith('{"grammars"')
    first, *others = json.loads(source)["grammars"] if is_json else [{"lark_grammar": source}]
    return [{**first, "name": name}, *others]
