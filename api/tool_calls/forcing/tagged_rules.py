"""Rules for calls that write each argument by itself."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from api.structured_output.lark import Lark, literal, one_of
from api.structured_output.tagged_values import Refuse, properties_of, tagged_value
from api.tool_calls.forcing.offer import CallsRule, ForcedTools, calls_between
from api.tool_calls.forcing.schemas import unsupported
from api.tool_calls.formats import tagged
from api.tool_calls.reading.deltas import Tool
from api.tool_calls.reading.scanner import NO_NAME

Arguments = Callable[[Tool, Mapping[str, Any]], str]
NAME = re.compile(f"[^\\s{re.escape(NO_NAME)}]+")


def functions_between(open: str, close: str, lark: Lark, forced: ForcedTools) -> CallsRule:
    """Functions with their parameters in tags: Qwen3-Coder's."""
    one = call_of_any(lark, forced, tagged.FUNCTION, ">\n", partial(arguments_of, lark, tagged.PARAMETER))
    tail = literal(f"{tagged.END_FUNCTION}\n")
    return calls_between(lark, forced, open, f'"\\n" {one} {tail}', close)


def glm_calls(lark: Lark, forced: ForcedTools) -> CallsRule:
    call = call_of_any(lark, forced, "", "\n", partial(arguments_of, lark, tagged.PAIR))
    return calls_between(lark, forced, tagged.OPEN, call, tagged.CLOSE)


def call_of_any(lark: Lark, forced: ForcedTools, before: str, after: str, arguments: Arguments) -> str:
    """A call of one of the functions: what stands around its name, and its arguments."""
    return lark.rule(
        one_of(
            f"{literal(before + tool.name + after)} {arguments(tool, schema)}"
            for tool, schema in forced.tools
        )
    )


def arguments_of(lark: Lark, tags: tagged.ArgumentTags, tool: Tool, schema: Mapping[str, Any]) -> str:
    """All arguments in the order of the schema; those that are not required may be missing."""
    parts = []
    refuse, [name_end] = refusal_of(tool), tags.name_ends
    for name, part, is_required in properties_of(schema, refuse):
        head = lark.marked(f"{tags.name}{name}{name_end}\n{tags.value}")
        argument = f'{head} {tagged_value(lark, part, tags.end, refuse=refuse)} "\\n"'
        parts.append(argument if is_required else f"({argument})?")
    return " ".join(parts)


def python_list(open: str, close: str, lark: Lark, forced: ForcedTools) -> CallsRule:
    """A list of calls with named arguments, whose values are JSON."""
    one = call_of_any(
        lark, forced, "", "(", lambda tool, schema: f'{named_arguments(lark, tool, schema)} ")"'
    )
    more = f' (", " {one})*' if forced.is_parallel else ""
    expression = f'"[" {one}{more} "]"'
    if open in lark.special_ids and close in lark.special_ids:
        return CallsRule(open, f"{expression} {lark.mark(close)}")
    return CallsRule("", expression, "[")


def named_arguments(lark: Lark, tool: Tool, schema: Mapping[str, Any]) -> str:
    required: list[str] = []
    optional: list[str] = []
    for name, part, is_required in properties_of(schema, refusal_of(tool)):
        if NAME.fullmatch(name) is None:
            raise unsupported(tool, f"properties/{name}")
        (required if is_required else optional).append(f"{literal(name + '=')} {lark.json(part)}")
    if required:
        return ' ", " '.join(required) + "".join(f' (", " {argument})?' for argument in optional)
    return f"({one_of(beginning_at(optional, i) for i in range(len(optional)))})?" if optional else ""


def beginning_at(arguments: Sequence[str], i: int) -> str:
    return arguments[i] + "".join(f' (", " {argument})?' for argument in arguments[i + 1 :])


def refusal_of(tool: Tool) -> Refuse | None:
    """How keywords are refused that calls cannot be held to; None for a function that is not strict."""
    return partial(unsupported, tool) if tool.strict else None
