"""Call rules: the rules of forced calls in Lark, for each format in which models write calls.

A format whose calls cannot be held to a keyword of a schema refuses it for strict functions.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from api.answers.harmony import CHANNEL, CONSTRAIN, ENDS, FUNCTIONS, MESSAGE, START
from api.answers.json_calls import (
    ARGS,
    DEEPSEEK,
    FENCE,
    KIMI,
    PYTHON_TAG,
    TGI_FUNCTION,
    TGI_NAME,
    TOOL_CALLS,
    SectionMarks,
)
from api.answers.scanner import NO_NAME, Tool
from api.answers.tagged_arguments import (
    END_FUNCTION,
    END_TOOL_CALL,
    FUNCTION,
    PAIR,
    PARAMETER,
    TOOL_CALL,
    ArgumentTags,
    resolve_reference,
    types_of,
)
from api.errors import ApiError, invalid
from api.grammar.compile import Grammar, compile_checked
from api.grammar.json_schema import WHITESPACE, enforced_schema
from api.grammar.lark import TEXT, Lark, literal, one_of

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
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
COMMA = '", "'
KIMI_NUMBER = '":" /[0-9]{1,2}/'
"""Kimi numbers the calls of an answer."""


@dataclass(frozen=True, slots=True)
class ForcedTools:
    """What a model may call.

    Attributes:
        tools: each with the schema that is forced of its arguments.
        is_parallel: an answer may have several calls.
    """

    tools: Sequence[tuple[Tool, Mapping[str, Any]]]
    is_parallel: bool

    def calls(self, call: str, between: str) -> str:
        """One call; if calls are parallel, or several of them with an expression between them."""
        return f"{call} ({between} {call})*" if self.is_parallel else call


@dataclass(frozen=True, slots=True)
class CallsRule:
    """The calls of an answer, in a grammar.

    Attributes:
        mark: the mark with which they begin; "" if there is none.
        rest: the expression of what follows the mark.
        first: without a mark, the character with which they begin.
    """

    mark: str
    rest: str
    first: str = ""


Rule = Callable[[Lark, ForcedTools], CallsRule]
Arguments = Callable[[Tool, Mapping[str, Any]], str]
"""(function, schema of its arguments) → the expression of its arguments."""


# --- schemas of arguments -----------------------------------------------------------------------------------


def field_of(tool: Tool) -> str:
    return f"tools.{tool.name}.parameters"


def forced_schema(tool: Tool) -> Mapping[str, Any]:
    """The schema that a grammar forces: the function's own, or any object if that cannot be compiled. Raises
    ApiError if the function is strict, and its schema cannot be compiled.
    """
    try:
        schema = closed(tool.parameters)
        compile_checked(Grammar("json", json.dumps(schema), field_of(tool), closed=True))
    except ApiError:
        if tool.strict:
            raise
        return with_whitespace(ANY_OBJECT)
    return with_whitespace(enforced_schema(schema, closed=True))


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


def with_whitespace(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def unsupported(tool: Tool, keyword: str) -> ApiError:
    cause = f"the keyword `{keyword}` is not supported in the format in which this model writes calls"
    return invalid(f"`{field_of(tool)}` cannot be compiled: {cause}", field_of(tool))


# --- calls whose arguments are one JSON object --------------------------------------------------------------


def calls_between(lark: Lark, forced: ForcedTools, open: str, call: str, close: str) -> CallsRule:
    """A call between two marks; each of several stands on its own line."""
    return CallsRule(open, forced.calls(f"{call} {lark.mark(close)}", f'"\\n" {lark.mark(open)}'))


def call_object(lark: Lark, forced: ForcedTools, arguments: str = "arguments") -> str:
    """`{"name": …, "arguments": …}` of one of the functions."""
    calls = []
    for tool, schema in forced.tools:
        head = literal(f'{{"name": {json.dumps(tool.name)}, "{arguments}": ')
        calls.append(f'{head} {lark.json(schema)} "}}"')
    return lark.rule(one_of(calls))


def objects_between(open: str, close: str, lark: Lark, forced: ForcedTools) -> CallsRule:
    """A call between two marks; several are on lines of their own."""
    return calls_between(lark, forced, open, f'"\\n" {call_object(lark, forced)} "\\n"', close)


def list_between(open: str, close: str, lark: Lark, forced: ForcedTools) -> CallsRule:
    """A list of calls between two marks; some formats have no second mark."""
    return CallsRule(open, f'"[" {forced.calls(call_object(lark, forced), COMMA)} "]" {lark.marked(close)}')


def list_after(word: str, lark: Lark, forced: ForcedTools) -> CallsRule:
    """A list of calls after a word. The word begins calls only if the bracket of the list follows it."""
    return CallsRule(f"{word}[", f'{forced.calls(call_object(lark, forced), COMMA)} "]"')


def mistral_calls(lark: Lark, forced: ForcedTools) -> CallsRule:
    """Models with the mark of arguments write names and arguments, others a list."""
    if ARGS not in lark.special_ids:
        return list_between(TOOL_CALLS, "", lark, forced)
    marked = lark.mark(ARGS)
    calls = [f"{literal(tool.name)} {marked} {lark.json(schema)}" for tool, schema in forced.tools]
    return CallsRule(TOOL_CALLS, forced.calls(lark.rule(one_of(calls)), lark.mark(TOOL_CALLS)))


def llama_calls(lark: Lark, forced: ForcedTools) -> CallsRule:
    calls = forced.calls(call_object(lark, forced, "parameters"), '"; "')
    tag = f"({lark.mark(PYTHON_TAG)})? " if PYTHON_TAG in lark.special_ids else ""
    return CallsRule("", tag + calls, "{")


def fenced_sections(marks: SectionMarks, lark: Lark, forced: ForcedTools) -> CallsRule:
    """Sections in which the arguments are fenced: DeepSeek V3's and R1's."""
    separator, end = lark.mark(marks.arguments_begin), literal("\n" + FENCE)
    calls = []
    for tool, schema in forced.tools:
        head = literal(f"{tool.name}\n{FENCE}json\n")
        calls.append(f'"function" {separator} {head} {lark.json(schema)} {end}')
    return sections(lark, forced, marks, calls, '"\\n"')


def named_sections(
    marks: SectionMarks, prefix: str, suffix: str, lark: Lark, forced: ForcedTools
) -> CallsRule:
    """Sections of a name, between a text and an expression, and arguments."""
    separator = lark.mark(marks.arguments_begin)
    calls = [
        f"{literal(prefix + tool.name)} {suffix} {separator} {lark.json(schema)}"
        for tool, schema in forced.tools
    ]
    return sections(lark, forced, marks, calls, "")


def sections(
    lark: Lark, forced: ForcedTools, marks: SectionMarks, calls: list[str], between: str
) -> CallsRule:
    one = lark.rule(f"{lark.mark(marks.call_begin)} {one_of(calls)} {lark.mark(marks.call_end)}")
    return CallsRule(marks.calls_begin, f"{forced.calls(one, between)} {lark.mark(marks.calls_end)}")


def tgi_call(lark: Lark, forced: ForcedTools) -> CallsRule:
    """One call. The name of the function is among its arguments."""
    calls = [lark.json(with_name(tool.name, schema)) for tool, schema in forced.tools]
    return CallsRule("", f'"{{\\"{TGI_FUNCTION}\\": " {one_of(calls)} "}}"', "{")


def with_name(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    named = {TGI_NAME: {"enum": [name]}}  # older drafts have no `const`
    return {
        **schema,
        "properties": {**named, **schema.get("properties", {})},
        "required": [*named, *schema.get("required", ())],
    }


# --- calls that write each argument by itself ---------------------------------------------------------------


def functions_between(open: str, close: str, lark: Lark, forced: ForcedTools) -> CallsRule:
    """Functions with their parameters in tags: Qwen3-Coder's."""
    one = call_of_any(lark, forced, FUNCTION, ">\n", partial(arguments_of, lark, PARAMETER))
    tail = literal(f"{END_FUNCTION}\n")
    return calls_between(lark, forced, open, f'"\\n" {one} {tail}', close)


def glm_calls(lark: Lark, forced: ForcedTools) -> CallsRule:
    call = call_of_any(lark, forced, "", "\n", partial(arguments_of, lark, PAIR))
    return calls_between(lark, forced, TOOL_CALL, call, END_TOOL_CALL)


def call_of_any(lark: Lark, forced: ForcedTools, before: str, after: str, arguments: Arguments) -> str:
    """A call of one of the functions: what stands around its name, and its arguments."""
    return lark.rule(
        one_of(
            f"{literal(before + tool.name + after)} {arguments(tool, schema)}"
            for tool, schema in forced.tools
        )
    )


def arguments_of(lark: Lark, tags: ArgumentTags, tool: Tool, schema: Mapping[str, Any]) -> str:
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


def python_list(open: str, close: str, lark: Lark, forced: ForcedTools) -> CallsRule:
    """A list of calls with named arguments, whose values are JSON."""
    one = call_of_any(
        lark, forced, "", "(", lambda tool, schema: f'{named_arguments(lark, tool, schema)} ")"'
    )
    expression = f'"[" {forced.calls(one, COMMA)} "]"'
    if open in lark.special_ids and close in lark.special_ids:
        return CallsRule(open, f"{expression} {lark.mark(close)}")
    return CallsRule("", expression, "[")


def named_arguments(lark: Lark, tool: Tool, schema: Mapping[str, Any]) -> str:
    required: list[str] = []
    optional: list[str] = []
    for name, part, is_required in properties_of(tool, schema):
        if PYTHON_NAME.fullmatch(name) is None:
            raise unsupported(tool, f"properties/{name}")
        (required if is_required else optional).append(f"{literal(name + '=')} {lark.json(part)}")
    if required:
        return ' ", " '.join(required) + "".join(f' (", " {argument})?' for argument in optional)
    return f"({one_of(beginning_at(optional, i) for i in range(len(optional)))})?" if optional else ""


def beginning_at(arguments: Sequence[str], i: int) -> str:
    return arguments[i] + "".join(f' (", " {argument})?' for argument in arguments[i + 1 :])


# --- Harmony: a grammar of the whole answer -----------------------------------------------------------------


def harmony_answer(lark: Lark, forced: ForcedTools, is_required: bool) -> str:
    """Analysis, then a call; where none is required also preambles, and the answer ends in any message."""
    channel, message = lark.mark(CHANNEL), lark.mark(MESSAGE)
    names = [(literal(f"{FUNCTIONS}{tool.name}"), lark.json(schema)) for tool, schema in forced.tools]
    before = [f'" to=" {name} {channel} "commentary json" {message} {value}' for name, value in names]
    after = [
        f'{channel} "commentary to=" {name} " " {lark.mark(CONSTRAIN)} "json" {message} {value}'
        for name, value in names
    ]
    if is_required:
        return f"({aside(lark, ['analysis'])})* {one_of([*before, *after])}"
    asides = ["analysis", "commentary"]
    last = [message_of(lark, asides, TEXT), message_of(lark, ["final"], TEXT)]
    return f"({aside(lark, asides)})* {one_of([*before, *after, *last])}"


def harmony_final(lark: Lark, content: str) -> str:
    """Analysis, then the final answer, with this content."""
    return f"({aside(lark, ['analysis'])})* {message_of(lark, ['final'], content)}"


def aside(lark: Lark, channels: Sequence[str]) -> str:
    """A message that is no answer, and the beginning of the next one."""
    return f'{message_of(lark, channels, lark.until(ENDS[0]))} {lark.mark(START)} "assistant"'


def message_of(lark: Lark, channels: Sequence[str], content: str) -> str:
    names = one_of(literal(channel) for channel in channels)
    return f"{lark.mark(CHANNEL)} {names} {lark.mark(MESSAGE)} {content}"


CALL_RULES: Mapping[str, Rule] = {
    "hermes": partial(objects_between, TOOL_CALL, END_TOOL_CALL),
    "qwen3_coder": partial(functions_between, TOOL_CALL, END_TOOL_CALL),
    "seed_oss": partial(functions_between, "<seed:tool_call>", "</seed:tool_call>"),
    "llama3_json": llama_calls,
    "llama4_pythonic": partial(python_list, "<|python_start|>", "<|python_end|>"),
    "pythonic": partial(python_list, "", ""),
    "lfm2": partial(python_list, "<|tool_call_start|>", "<|tool_call_end|>"),
    "mistral": mistral_calls,
    "deepseek_v3": partial(fenced_sections, DEEPSEEK),
    "deepseek_v31": partial(named_sections, DEEPSEEK, "", ""),
    "kimi_k2": partial(named_sections, KIMI, "functions.", KIMI_NUMBER),
    "glm45": glm_calls,
    "granite": partial(list_between, "<|tool_call|>", ""),
    "nemotron_json": partial(list_between, "<TOOLCALL>", "</TOOLCALL>"),
    "jamba": partial(list_between, "<tool_calls>", "</tool_calls>"),
    "phi4_mini_json": partial(list_after, "functools"),
    "tgi": tgi_call,
}
"""By the names of formats; Harmony has a grammar of its own."""
