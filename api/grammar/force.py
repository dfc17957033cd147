"""Forced calls: the grammar of an answer with calls in the model's format, and of thinking before it.

A format's row says how its calls are written. A format whose calls cannot be held to a keyword of a schema
refuses it for strict functions.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.answers.call_formats import CALL_FORMATS, HARMONY, CallFormat, ReasoningFormat, Writing
from api.answers.call_readers import (
    CHANNEL,
    ENDS,
    MESSAGE,
    PAIR,
    PARAMETER,
    START,
    TGI_NAME,
    ArgumentTags,
    resolve_reference,
    types_of,
)
from api.answers.scanner import NO_NAME, Tool
from api.errors import ApiError, cut, invalid
from api.grammar.apart import run_apart
from api.grammar.check import find_error
from api.grammar.compile import ANY_OBJECT, MAX_GRAMMAR_BYTES, Grammar, embedded_schema
from api.grammar.lark import TEXT, Lark, literal, one_of, regex

LINES = r"/\n{0,2}/"
"""White space between thinking and what follows it."""
OPEN_OBJECT = ("additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf", "$ref", "if")
"""With one of these, a schema says itself which other properties there may be."""
DEFINITIONS = ("$defs", "definitions")
ANNOTATIONS = ("title", "description", "$schema", "$id", "$comment")
WHOLE_OBJECT = (
    *("anyOf", "oneOf", "allOf", "not", "if", "$ref", "enum", "const", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
)
"""Keywords that say something of an object as a whole, not of one property."""
TEXT_KEYWORDS = ("pattern", "format", "minLength", "maxLength")
PYTHON_NAME = re.compile(f"[^\\s{re.escape(NO_NAME)}]+")
Thinking = tuple[ReasoningFormat, bool] | None
"""The thinking with which an answer begins, and whether the answer begins inside of it; None for none."""
ForcedTools = Sequence[tuple[Tool, Mapping[str, Any]]]
"""What a model may call: each function, and the schema that is forced of its arguments."""


@dataclass(frozen=True, slots=True)
class CallChoice:
    """What a request says about calls.

    Attributes:
        is_required: the answer has a call.
        is_parallel: it may have several.
    """

    is_required: bool
    is_parallel: bool = True


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
    marks = {*calls.marks, *(thinking[0].marks if thinking else ())}
    ids = tuple((mark, special_ids[mark]) for mark in sorted(marks) if mark in special_ids)
    try:
        return await run_apart("tools", compile_calls, calls.name, key, choice, ids, thinking)
    except ApiError:
        if must_be_forced(tools, choice):
            raise
        return ""


def compile_calls(
    name: str, key: str, choice: CallChoice, ids: tuple[tuple[str, int], ...], thinking: Thinking
) -> str:
    tools, form = [Tool(*fields) for fields in json.loads(key)], CALL_FORMATS[name]
    if not must_be_forced(tools, choice) and not form.writing(dict(ids)).mark:
        return ""  # nothing says where free text ends and a call begins
    forced = [(tool, forced_schema(tool)) for tool in tools]
    if cause := find_error(call_source(form, Lark({}), forced, choice, thinking)):
        field = field_of(tools[0]) if len(tools) == 1 else "tools"
        raise invalid(f"`{field}` cannot be compiled: {cut(cause)}", field)
    return call_source(form, Lark(dict(ids)), forced, choice, thinking)


def must_be_forced(tools: Sequence[Tool], choice: CallChoice) -> bool:
    """Whether a client relies on calls that match their schemas."""
    return choice.is_required or any(tool.strict for tool in tools)


# --- answers ------------------------------------------------------------------------------------------------


def call_source(
    form: CallFormat, lark: Lark, forced: ForcedTools, choice: CallChoice, thinking: Thinking
) -> str:
    """The grammar of an answer in a format."""
    writing = form.writing(lark.special_ids)
    if form.name == HARMONY:
        return lark.source(harmony_answer(lark, writing, forced, choice.is_required))
    one = lark.rule(one_of(call_of(lark, writing.call, tool, schema) for tool, schema in forced))
    several = choice.is_parallel and writing.between is not None
    calls = f"{one} ({lark.marked(writing.between or '')} {one})*" if several else one
    rest = f"{lark.marked(writing.open)} {calls} {lark.marked(writing.close)}"
    if writing.may_open in lark.special_ids:
        rest = f"({lark.mark(writing.may_open)})? {rest}"
    body = f"{lark.mark(writing.mark)} {rest}" if writing.mark else rest
    if not choice.is_required and not writing.mark:
        first = re.escape((writing.open + writing.call)[0])
        other = lark.rule(regex(rf"[^\s{first}](.|\n)*"))
        body = f"({other} | {rest})?"
    elif not choice.is_required:
        found, text = f"{lark.until(writing.mark)} {rest}", lark.rule(TEXT)
        body = f"({found})* {text}" if choice.is_parallel else f"{found} | {text}"
    return lark.source(f"{thinking_rule(lark, thinking)} {lark.rule(body)}")


def harmony_answer(lark: Lark, writing: Writing, forced: ForcedTools, is_required: bool) -> str:
    """Analysis, then a call; where none is required also preambles, and the answer ends in any message."""
    texts = (writing.call, *writing.other_calls)
    calls = [call_of(lark, text, tool, schema) for text in texts for tool, schema in forced]
    if is_required:
        return f"({aside(lark, ['analysis'])})* {one_of(calls)}"
    asides = ["analysis", "commentary"]
    last = [message_of(lark, asides, TEXT), message_of(lark, ["final"], TEXT)]
    return f"({aside(lark, asides)})* {one_of([*calls, *last])}"


def aside(lark: Lark, channels: Sequence[str]) -> str:
    """A message of Harmony that is no answer, and the beginning of the next one."""
    return f"{message_of(lark, channels, lark.until(ENDS[0]))} {lark.marked(f'{START}assistant')}"


def message_of(lark: Lark, channels: Sequence[str], content: str) -> str:
    return f"{lark.mark(CHANNEL)} {one_of(map(literal, channels))} {lark.mark(MESSAGE)} {content}"


def thinking_after(form: ReasoningFormat | None, prompt: str) -> Thinking:
    """The thinking that an answer to this prompt may begin with."""
    return None if form is None or form.is_closed(prompt) else (form, form.begins_inside(prompt))


def thinking_rule(lark: Lark, thinking: Thinking) -> str:
    """The rule of the thinking before an answer, and of the white space after it."""
    if thinking is None:
        return ""
    form, begins_inside = thinking
    open, rest = lark.mark(form.open), f"{lark.until(form.close)} {LINES}"
    if not begins_inside:
        return f"({open} {rest})?"
    return f"({open})? {rest}" if form.open in lark.special_ids else rest


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
        final = message_of(lark, ["final"], lark.nest(source, "answer"))
        return lark.source(f"({aside(lark, ['analysis'])})* {final}")
    if thinking is None:
        return source
    return lark.source(f"{thinking_rule(lark, thinking)} {lark.nest(source, 'answer')}")


def either(calls: str, text: str) -> str:
    """The grammar of answers that match one of two."""
    lark = Lark({})
    return lark.source(f"{lark.nest(calls, 'calls')} | {lark.nest(text, 'text')}")


# --- calls --------------------------------------------------------------------------------------------------


def call_of(lark: Lark, text: str, tool: Tool, schema: Mapping[str, Any]) -> str:
    """A call of a function, from the text of the format's calls."""
    pieces = re.split(r"\$(\w+)", text.replace("$name", tool.name))
    return " ".join(
        PARTS[piece](lark, tool, schema) if i % 2 else lark.marked(piece) for i, piece in enumerate(pieces)
    )


def with_name(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of arguments that have the function's name among them, as TGI writes it."""
    named = {TGI_NAME: {"enum": [name]}}  # older drafts have no `const`
    return {
        **schema,
        "properties": {**named, **schema.get("properties", {})},
        "required": [*named, *schema.get("required", ())],
    }


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
    if types_of(schema, schema) != {"string"}:
        return f"{lark.json(schema)} {lark.marked(end)}"
    check_keywords(tool, schema, TEXT_KEYWORDS)
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
    "arguments_with_name": lambda lark, tool, schema: lark.json(with_name(tool.name, schema)),
    "parameters": functools.partial(tagged_arguments, PARAMETER),
    "pairs": functools.partial(tagged_arguments, PAIR),
    "keywords": keyword_arguments,
    "number": lambda lark, tool, schema: "/[0-9]{1,2}/",
}
"""Parts of a call that `$` marks in its text → what makes its expression: (function, schema of arguments)."""


# --- schemas of arguments -----------------------------------------------------------------------------------


def field_of(tool: Tool) -> str:
    return f"tools.{tool.name}.parameters"


def forced_schema(tool: Tool) -> Mapping[str, Any]:
    """The schema that a grammar forces: the function's own, or any object if that cannot be compiled. Raises
    ApiError if the function is strict, and its schema cannot be compiled.
    """
    field = field_of(tool)
    try:
        return embedded_schema(Grammar("json", json.dumps(closed(tool.parameters)), field, closed=True))
    except ApiError:
        if tool.strict:
            raise
        return embedded_schema(Grammar("json", ANY_OBJECT, field))


def closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of an object that has only the properties that the schema names."""
    schema = {**(inlined(parameters) or {"properties": {}}), "type": "object"}
    if "properties" in schema and not any(keyword in schema for keyword in OPEN_OBJECT):
        return schema | {"additionalProperties": False}
    return schema


def inlined(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that this one refers to, with its definitions, if it is only a reference; else itself."""
    path = schema.get("$ref")
    if not isinstance(path, str) or not {*schema} <= {"$ref", "type", *DEFINITIONS, *ANNOTATIONS}:
        return schema
    target = resolve_reference(path, schema)
    if not isinstance(target, Mapping) or "$ref" in target:
        return schema
    return {name: schema[name] for name in DEFINITIONS if name in schema} | dict(target)


def properties_of(tool: Tool, schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """(name, schema, whether it is required) of each argument. A schema stands alone: it has the definitions
    to which it may refer, and the white space of the whole.
    """
    check_keywords(tool, schema, WHOLE_OBJECT)
    shared = {name: schema[name] for name in (*DEFINITIONS, "x-guidance") if name in schema}
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    for name in dict.fromkeys([*properties, *required]):
        part = properties.get(name)
        yield name, {**shared, **(part if isinstance(part, Mapping) else {})}, name in required


def check_keywords(tool: Tool, schema: Mapping[str, Any], keywords: Sequence[str]) -> None:
    """Raises ApiError for a strict function whose schema has a keyword that its calls cannot be held to."""
    for keyword in keywords:
        if tool.strict and keyword in schema:
            raise unsupported(tool, keyword)


def unsupported(tool: Tool, keyword: str) -> ApiError:
    cause = f"the keyword `{keyword}` is not supported in the format in which this model writes calls"
    return invalid(f"`{field_of(tool)}` cannot be compiled: {cause}", field_of(tool))
