"""Rules for calls whose arguments are one JSON object."""

import json
from collections.abc import Mapping
from typing import Any

from api.structured_output.lark import Lark, listed, literal, one_of
from api.tool_calls.forcing.offer import CallsRule, Offer, calls_between
from api.tool_calls.formats.llama_json import PYTHON_TAG
from api.tool_calls.formats.mistral import ARGS, TOOL_CALLS
from api.tool_calls.formats.sections import FENCE, SectionMarks
from api.tool_calls.formats.tgi import TGI_FUNCTION, TGI_NAME


def call_objects(lark: Lark, offer: Offer, arguments: str) -> list[str]:
    """`{"name": …, "arguments": …}` for each function."""
    calls = []
    for tool, schema in offer.tools:
        head = literal(f'{{"name": {json.dumps(tool.name)}, "{arguments}": ')
        calls.append(f'{head} {lark.json(schema)} "}}"')
    return calls


def objects_between(open: str, close: str, lark: Lark, offer: Offer) -> CallsRule:
    """A call between two marks; several are on lines of their own."""
    one = lark.rule(one_of(call_objects(lark, offer, "arguments")))
    return calls_between(lark, offer, open, f'"\\n" {one} "\\n"', close)


def list_between(open: str, close: str, lark: Lark, offer: Offer) -> CallsRule:
    """A list of calls between two marks; some formats have no second mark."""
    calls = listed(call_objects(lark, offer, "arguments"), ", ", offer.is_parallel)
    return CallsRule(open, f'"[" {calls} "]" {lark.marked(close)}')


def list_after(word: str, lark: Lark, offer: Offer) -> CallsRule:
    """A list of calls after a word. The word begins calls only if the bracket of the list follows it."""
    calls = listed(call_objects(lark, offer, "arguments"), ", ", offer.is_parallel)
    return CallsRule(f"{word}[", f'{calls} "]"')


def mistral_calls(lark: Lark, offer: Offer) -> CallsRule:
    """Models with the mark of arguments write names and arguments, others a list."""
    if ARGS not in lark.special_ids:
        return list_between(TOOL_CALLS, "", lark, offer)
    marked = lark.mark(ARGS)
    calls = [f"{literal(tool.name)} {marked} {lark.json(schema)}" for tool, schema in offer.tools]
    one = lark.rule(one_of(calls))
    more = f" ({lark.mark(TOOL_CALLS)} {one})*" if offer.is_parallel else ""
    return CallsRule(TOOL_CALLS, one + more)


def llama_calls(lark: Lark, offer: Offer) -> CallsRule:
    calls = listed(call_objects(lark, offer, "parameters"), "; ", offer.is_parallel)
    tag = f"({lark.mark(PYTHON_TAG)})? " if PYTHON_TAG in lark.special_ids else ""
    return CallsRule("", tag + calls, "{")


def fenced_sections(marks: SectionMarks, lark: Lark, offer: Offer) -> CallsRule:
    """Sections in which the arguments are fenced: DeepSeek V3's and R1's."""
    separator, end = lark.mark(marks.arguments_begin), literal("\n" + FENCE)
    calls = []
    for tool, schema in offer.tools:
        head = literal(f"{tool.name}\n{FENCE}json\n")
        calls.append(f'"function" {separator} {head} {lark.json(schema)} {end}')
    return sections(lark, marks, calls, '"\\n"', offer.is_parallel)


def named_sections(marks: SectionMarks, prefix: str, suffix: str, lark: Lark, offer: Offer) -> CallsRule:
    """Sections of a name, between a text and an expression, and arguments."""
    separator = lark.mark(marks.arguments_begin)
    calls = [
        f"{literal(prefix + tool.name)} {suffix} {separator} {lark.json(schema)}"
        for tool, schema in offer.tools
    ]
    return sections(lark, marks, calls, "", offer.is_parallel)


def sections(lark: Lark, marks: SectionMarks, calls: list[str], between: str, is_parallel: bool) -> CallsRule:
    one = lark.rule(f"{lark.mark(marks.call_begin)} {one_of(calls)} {lark.mark(marks.call_end)}")
    more = f" ({between} {one})*" if is_parallel else ""
    return CallsRule(marks.calls_begin, f"{one}{more} {lark.mark(marks.calls_end)}")


def tgi_call(lark: Lark, offer: Offer) -> CallsRule:
    """One call. The name of the function is among its arguments."""
    calls = [lark.json(with_name(tool.name, schema)) for tool, schema in offer.tools]
    return CallsRule("", f'"{{\\"{TGI_FUNCTION}\\": " {one_of(calls)} "}}"', "{")


def with_name(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    named = {TGI_NAME: {"enum": [name]}}  # older drafts have no `const`
    return {
        **schema,
        "properties": {**named, **schema.get("properties", {})},
        "required": [*named, *schema.get("required", ())],
    }
