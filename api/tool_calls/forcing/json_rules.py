"""Rules for calls whose arguments are one JSON object."""

import json
from collections.abc import Mapping
from typing import Any

from api.structured_output.lark import Lark, literal, one_of
from api.tool_calls.forcing.offer import COMMA, CallsRule, ForcedTools, calls_between
from api.tool_calls.formats.llama_json import PYTHON_TAG
from api.tool_calls.formats.mistral import ARGS, TOOL_CALLS
from api.tool_calls.formats.sections import FENCE, SectionMarks
from api.tool_calls.formats.tgi import TGI_FUNCTION, TGI_NAME


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
