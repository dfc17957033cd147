"""Rules for calls that write each argument by itself."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from api.structured_output.lark import Lark, literal, one_of
from api.tool_calls.forcing.offer import COMMA, CallsRule, ForcedTools, calls_between
from api.tool_calls.forcing.schemas import DEFINITIONS, unsupported
from api.tool_calls.formats.tagged import (
    END_FUNCTION,
    END_TOOL_CALL,
    FUNCTION,
    PAIR,
    PARAMETER,
    TOOL_CALL,
    ArgumentTags,
)
from api.tool_calls.reading.deltas import Tool
from api.tool_calls.reading.scanner import NO_NAME
from api.tool_calls.reading.typed_text import types_of

Arguments = Callable[[Tool, Mapping[str, Any]], str]
NAME = re.compile(f"[^\\s{re.escape(NO_NAME)}]+")
OF_OBJECTS = (
    *("anyOf", "oneOf", "allOf", "not", "if", "$ref", "enum", "const", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
)
"""Keywords that say something of an object as a whole."""
OF_TEXTS = ("pattern", "format", "minLength", "maxLength")


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
    check_keywords(tool, schema, OF_TEXTS)
    return lark.until(end)


def properties_of(tool: Tool, schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """(name, schema, whether it is required) of each argument. A schema stands alone: it has the definitions
    to which it may refer, and the white space of the whole.
    """
    check_keywords(tool, schema, OF_OBJECTS)
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
        if NAME.fullmatch(name) is None:
            raise unsupported(tool, f"properties/{name}")
        (required if is_required else optional).append(f"{literal(name + '=')} {lark.json(part)}")
    if required:
        return ' ", " '.join(required) + "".join(f' (", " {argument})?' for argument in optional)
    return f"({one_of(beginning_at(optional, i) for i in range(len(optional)))})?" if optional else ""


def beginning_at(arguments: Sequence[str], i: int) -> str:
    return arguments[i] + "".join(f' (", " {argument})?' for argument in arguments[i + 1 :])
