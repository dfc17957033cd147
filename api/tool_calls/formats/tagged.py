"""Calls whose arguments are tagged texts: Qwen3-Coder's and GLM's."""

import json
from typing import NamedTuple

from api.tool_calls.reading.scanner import MAX_NAME, Scan, Scanner, Waiting
from api.tool_calls.reading.typed_text import property_types, read_typed

TOOL_CALL = "<tool_call>"
END_TOOL_CALL = "</tool_call>"
FUNCTION = "<function="
END_FUNCTION = "</function>"


class ArgumentTags(NamedTuple):
    """What stands around the name of an argument and its value.

    Attributes:
        name_end: follows the name.
        value: follows that, and white space; "" if the value follows at once.
        line: what divides tags and value besides, where the model writes it.
        untyped: the types of a parameter of which the schema says none.
    """

    name: str
    name_end: str
    value: str
    end: str
    line: str = ""
    untyped: frozenset[str] = frozenset()


PARAMETER = ArgumentTags("<parameter=", ">", "", "</parameter>", "\n", frozenset(["string"]))
PAIR = ArgumentTags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def read_functions(open: str, close: str, scanner: Scanner) -> Scan:
    """Read Qwen3-Coder's functions between two marks, which are missing at times."""
    while mark := (yield from scanner.content_until(open, FUNCTION)):
        yield from scanner.skip()
        has_begun = mark == FUNCTION or (yield from scanner.literal(FUNCTION))
        if not has_begun or not (yield from read_tagged_call(scanner, ">", PARAMETER, END_FUNCTION)):
            scanner.reject()
        else:
            yield from scanner.skip()
            yield from scanner.literal(close)


def read_glm(scanner: Scanner) -> Scan:
    while (yield from scanner.content_until(TOOL_CALL)):
        yield from scanner.skip()
        if not (yield from read_tagged_call(scanner, "", PAIR, END_TOOL_CALL)):
            scanner.reject()


def read_tagged_call(scanner: Scanner, name_end: str, tags: ArgumentTags, end: str) -> Waiting:
    """Read a name and the mark after it, tagged arguments, and the mark after these."""
    name = yield from scanner.name()
    if not name or not (yield from scanner.literal(name_end)):
        return False
    yield from scanner.skip()
    if not (yield from scanner.next_is(tags.name, end)):
        return False
    scanner.start_call(name)
    parameters = next((tool.parameters for tool in scanner.tools if tool.name == name), {})
    before = "{"
    awaited: tuple[str, ...] = (tags.name, end)
    while (yield from scanner.literal(tags.name)):
        key = yield from scanner.until(tags.name_end, MAX_NAME)
        if key is None:
            if scanner.ended and len(scanner.text) - scanner.position <= MAX_NAME:
                return False
            break
        if tags.value:
            yield from scanner.skip()
        if not (yield from scanner.literal(tags.value)):
            awaited = (tags.value,)
            break
        yield from scanner.literal(tags.line)
        scanner.add_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        types = property_types(parameters, key) or tags.untyped
        if not (yield from read_typed(scanner, types, tags.line + tags.end, tags.end)):
            return False
        yield from scanner.skip()
    found = yield from scanner.literal(end)
    rest = scanner.text[scanner.position :]
    if found or not scanner.ended or not any(mark.startswith(rest) for mark in awaited):
        scanner.add_arguments("{}" if before == "{" else "}")  # else the text ends before the mark
    return found
