"""Forced calls: the grammar of an answer with calls in the model's format, and of thinking before it.

A format's row says how its calls are written. A format whose calls cannot be held to a keyword of a schema
refuses it for strict functions.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from api.answers.call_formats import (
    CALL_FORMATS,
    CHANNEL,
    ENDS,
    FUNCTIONS,
    HARMONY,
    MESSAGE,
    PAIR,
    PARAMETER,
    START,
    ArgumentTags,
    CallFormat,
    ReasoningFormat,
)
from api.answers.call_readers import resolve_reference, types_of
from api.answers.scanner import NO_NAME, Tool
from api.errors import ApiError
from api.grammar.compile import Grammar, cannot_compile, check_size, checked, compile_checked, run_apart
from api.grammar.lark import TEXT, Lark, SpecialIds, all_schemas, enforced, literal, one_of, regex

LINES = r"/\n{0,2}/"
"""White space between thinking and what follows it."""
SCHEMA_FIELD = "tools.{}.parameters"
SHARED = ("$defs", "definitions", "x-guidance")
"""Keywords that the parts of a schema have from the whole."""
BESIDE_REFERENCE = {"$ref", "type", *SHARED, "title", "description", "$schema", "$id", "$comment"}
"""Keywords beside which a reference says all of a schema."""
UNHELD = (
    *("anyOf", "oneOf", "allOf", "$ref", "enum", "const", "patternProperties"),
    *("minProperties", "maxProperties", "pattern", "format", "minLength", "maxLength"),
)
"""Keywords of an object or a text to which calls of single arguments cannot be held."""
WHOLE = "the-whole"
"""The name of a definition that is the whole schema."""
PLACE = re.compile(r"#(?!/(\$defs|definitions)/)")
"""A reference to a schema, or to a part of it that is no definition."""
PYTHON_NAME = re.compile(f"[^\\s{re.escape(NO_NAME)}]+")
ForcedTools = Sequence[tuple[Tool, Mapping[str, Any]]]
"""What a model may call: each function, and the schema that is forced of its arguments."""


async def call_grammar(
    form: CallFormat,
    tools: Sequence[Tool],
    special_ids: Mapping[str, int],
    is_required: bool,
    is_parallel: bool = True,
) -> str:
    """The grammar, in llguidance's form, of an answer that may call these functions; "" if nothing is forced.
    Raises ApiError (422) that names the function, the keyword at fault and its place.

    If no call is required and no function is strict, a call is forced only after the mark with which it
    begins. Nothing is forced then in formats without a mark, or if the grammar cannot be compiled.

    Args:
        special_ids: ids of the model's special tokens, by their texts.
        is_required: the answer has a call.
        is_parallel: it may have several.
    """
    must = is_required or any(tool.strict for tool in tools)  # whether a client relies on valid calls
    key = json.dumps([[tool.name, tool.parameters, tool.strict] for tool in tools])
    ids = tuple((mark, special_ids[mark]) for mark in form.marks if mark in special_ids)
    if not must and not form.writing(special_ids).mark:
        return ""  # nothing says where free text ends and a call begins
    try:
        check_size("tools", key)
        return await run_apart("tools", compile_calls, form.name, key, ids, is_required, is_parallel)
    except ApiError:
        if must:
            raise
        return ""


def compile_calls(name: str, key: str, special_ids: SpecialIds, is_required: bool, is_parallel: bool) -> str:
    form, tools = CALL_FORMATS[name], [Tool(*fields) for fields in json.loads(key)]
    forced = [(tool, forced_schema(tool)) for tool in tools]
    return checked(
        "tools", lambda ids: call_source(form, Lark(ids), forced, is_required, is_parallel), special_ids
    )


def answer_source(
    calls: str,
    text: str,
    form: CallFormat | None,
    reasoning: ReasoningFormat | None,
    prompt: str,
    special_ids: SpecialIds,
) -> str:
    """The grammar of an answer: thinking, then calls or a text. In Harmony, the text is the final message.

    Args:
        calls, text: their grammars; "" for none.
        prompt: at least its end.
    """
    lark = Lark(special_ids)
    is_harmony = form is not None and form.name == HARMONY
    thinking = asides(lark, "analysis") if is_harmony else thinking_rule(lark, reasoning, prompt)
    if not thinking and not (calls and text):
        return calls or text
    found = [lark.nest(calls, "calls")] if calls else []
    if text:
        answer = lark.nest(text, "text")
        found += [message_of(lark, ["final"], answer) if is_harmony else answer]
    return lark.source(f"{thinking} {one_of(found)}")


def thinking_rule(lark: Lark, form: ReasoningFormat | None, prompt: str) -> str:
    """The rule of the thinking with which an answer to this prompt may begin, and of the white space after
    it; "" for none.
    """
    if form is None or form.is_closed(prompt):
        return ""
    open, rest = lark.marked(form.open), f"{lark.until(form.close)} {LINES}"
    if not form.begins_inside(prompt):
        return f"({open} {rest})?"
    return f"({open})? {rest}" if form.open in lark.special_ids else rest


# --- answers ------------------------------------------------------------------------------------------------


def call_source(
    form: CallFormat, lark: Lark, forced: ForcedTools, is_required: bool, is_parallel: bool
) -> str:
    """The grammar of calls in a format, and of text before and after them if none is required."""
    writing = form.writing(lark.special_ids)
    if form.name == HARMONY:
        return lark.source(harmony_answer(lark, form, forced, is_required))
    one = lark.rule(one_of(call_of(lark, writing.call, tool, schema) for tool, schema in forced))
    several = is_parallel and writing.between is not None
    calls = f"{one} ({lark.marked(writing.between or '')} {one})*" if several else one
    rest = f"{lark.marked(writing.open)} {calls} {lark.marked(writing.close)}"
    if is_required:
        return lark.source(f"{lark.marked(writing.mark)} {rest}")
    if not writing.mark:
        first = re.escape((writing.open + writing.call)[0])
        other = lark.rule(regex(rf"[^\s{first}](.|\n)*"))
        return lark.source(f"({other} | {rest})?")
    found, text = f"{lark.until(writing.mark)} {rest}", lark.rule(TEXT)
    return lark.source(f"({found})* {text}" if is_parallel else f"{found} | {text}")


def harmony_answer(lark: Lark, form: CallFormat, forced: ForcedTools, is_required: bool) -> str:
    """A call; where none is required also preambles before it, and the answer ends in any message."""
    calls = one_of(call_of(lark, one.call, tool, schema) for one in form.writings for tool, schema in forced)
    if is_required:
        return calls
    last = message_of(lark, ["analysis", "commentary", "final"], TEXT)
    return f"{asides(lark, 'analysis', 'commentary')} {one_of([calls, last])}"


def asides(lark: Lark, *channels: str) -> str:
    """Messages of Harmony that are no answer, and the beginning of the next one."""
    return f"({message_of(lark, channels, lark.until(ENDS[0]))} {lark.marked(f'{START}assistant')})*"


def message_of(lark: Lark, channels: Sequence[str], content: str) -> str:
    return f"{lark.marked(CHANNEL)} {one_of(map(literal, channels))} {lark.marked(MESSAGE)} {content}"


# --- calls --------------------------------------------------------------------------------------------------


def call_of(lark: Lark, text: str, tool: Tool, schema: Mapping[str, Any]) -> str:
    """A call of a function, from the text of the format's calls."""
    pieces = re.split(r"\$(\w+)", text.replace("$name", tool.name))
    return " ".join(
        PARTS[piece](lark, tool, schema) if i % 2 else lark.marked(piece) for i, piece in enumerate(pieces)
    )


def tagged_arguments(tags: ArgumentTags, lark: Lark, tool: Tool, schema: Mapping[str, Any]) -> str:
    """All arguments in the order of the schema; those that are not required may be missing."""
    parts = []
    for name, part, is_required in properties_of(tool, schema):
        head = lark.marked(f"{tags.name}{name}{tags.name_end}\n{tags.value}")
        argument = f'{head} {tagged_value(lark, tool, part, tags.end)} "\\n"'
        parts.append(argument if is_required else f"({argument})?")
    return " ".join(parts)


def tagged_value(lark: Lark, tool: Tool, schema: Mapping[str, Any], end: str) -> str:
    """A value and the mark after it: a text as it is, any other as JSON."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and any(isinstance(value, str) for value in values):
        words = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return f"{one_of(map(literal, words))} {lark.marked(end)}"
    if types_of(schema, schema, {}) != {"string"}:
        return f"{lark.json(schema)} {lark.marked(end)}"
    check_keywords(tool, schema)
    return lark.until(end)


def keyword_arguments(lark: Lark, tool: Tool, schema: Mapping[str, Any]) -> str:
    """Arguments by name, as Python has them; their values are JSON. The required ones come first."""
    required: list[str] = []
    optional: list[str] = []
    for name, part, is_required in properties_of(tool, schema):
        if PYTHON_NAME.fullmatch(name) is None:
            raise unsupported(tool, f"properties/{name}")
        (required if is_required else optional).append(f"{literal(name + '=')} {lark.json(part)}")
    more = [f' (", " {argument})?' for argument in optional]
    if required:
        return ' ", " '.join(required) + "".join(more)
    starts = [first + "".join(more[i + 1 :]) for i, first in enumerate(optional)]
    return f"({one_of(starts)})?" if starts else ""


PARTS: Mapping[str, Callable[[Lark, Tool, Mapping[str, Any]], str]] = {
    "arguments": lambda lark, tool, schema: lark.json(schema),
    "parameters": functools.partial(tagged_arguments, PARAMETER),
    "pairs": functools.partial(tagged_arguments, PAIR),
    "keywords": keyword_arguments,
    "id": lambda lark, tool, schema: f"{lark.marked(f'{FUNCTIONS}{tool.name}:')} /[0-9]{{1,2}}/",
}
"""Parts of a call that `$` marks in its text → what makes its expression: (function, schema of arguments)."""


# --- schemas of arguments -----------------------------------------------------------------------------------


def forced_schema(tool: Tool) -> Mapping[str, Any]:
    """The schema that a grammar forces: the function's own, or any object if that cannot be compiled. Raises
    ApiError if the function is strict, and its schema cannot be compiled.
    """
    schema = {**(inlined(tool.parameters) or {"properties": {}}), "type": "object"}
    try:
        compile_checked(Grammar("json", json.dumps(schema), SCHEMA_FIELD.format(tool.name), closed=True))
    except ApiError:
        if tool.strict:
            raise
        schema = {"type": "object"}
    return enforced(schema, closed=True)


def inlined(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that this one refers to, with its definitions, if it is only a reference; else itself."""
    path = schema.get("$ref")
    target = resolve_reference(path, schema) if isinstance(path, str) else None
    if not isinstance(target, Mapping) or not {*schema} <= BESIDE_REFERENCE:
        return schema
    return {name: schema[name] for name in SHARED if name in schema} | dict(target)


def properties_of(tool: Tool, schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """(name, schema, whether it is required) of each argument. A schema stands alone: it has the definitions
    to which it may refer, and the white space of the whole.
    """
    check_keywords(tool, schema)
    schema = with_whole(schema)
    shared = {name: schema[name] for name in SHARED if name in schema}
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    for name in dict.fromkeys([*properties, *required]):
        part = properties.get(name)
        yield name, inlined({**shared, **(part if isinstance(part, Mapping) else {})}), name in required


def with_whole(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema for parts that stand alone: its references to itself, or to a place in it that is no
    definition, lead into one of the whole.
    """
    copied = json.loads(json.dumps(schema))
    moved = [one for one in all_schemas(copied) if PLACE.match(str(one.get("$ref")))]
    if moved:
        whole = {name: part for name, part in copied.items() if name not in SHARED}
        copied["$defs"] = {**(copied.get("$defs") or {}), WHOLE: whole}
    for one in moved:
        one["$ref"] = f"#/$defs/{WHOLE}{one['$ref'][1:]}"
    return copied  # type: ignore[no-any-return]


def check_keywords(tool: Tool, schema: Mapping[str, Any]) -> None:
    """Raises ApiError for a strict function whose schema has a keyword that its calls cannot be held to."""
    if tool.strict and (unheld := [keyword for keyword in UNHELD if keyword in schema]):
        raise unsupported(tool, unheld[0])


def unsupported(tool: Tool, keyword: str) -> ApiError:
    cause = f"the keyword `{keyword}` is not supported in the format in which this model writes calls"
    return cannot_compile(SCHEMA_FIELD.format(tool.name), cause)
