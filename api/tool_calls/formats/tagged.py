"""Calls whose arguments are tagged texts: Qwen3-Coder's and GLM's."""

import json
from typing import NamedTuple

from api.tool_calls.reading.scanner import MAX_NAME, Reader, Reading, Waiting
from api.tool_calls.reading.typed_text import property_types, read_typed

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
END_FUNCTION = "</function>"


class ArgumentTags(NamedTuple):
    """What stands around the name of an argument and its value.

    Attributes:
        name_ends: one of them stands behind the name.
        value: stands behind that, and white space; "" if the value follows at once.
        line: what divides tags and value besides, where the model writes it.
        untyped: the types of a parameter of which the schema says none.
    """

    name: str
    name_ends: tuple[str, ...]
    value: str
    end: str
    line: str = ""
    untyped: frozenset[str] = frozenset()


PARAMETER = ArgumentTags("<parameter=", (">",), "", "</parameter>", "\n", frozenset(["string"]))
PAIR = ArgumentTags("<arg_key>", ("</arg_key>",), "<arg_value>", "</arg_value>")


def read_functions(open: str, close: str, reader: Reader) -> Reading:
    """Read Qwen3-Coder's functions between two marks, which are missing at times."""
    while mark := (yield from reader.content_until(open, FUNCTION)):
        yield from reader.skip()
        has_begun = mark == FUNCTION or (yield from reader.literal(FUNCTION))
        if not has_begun or not (yield from read_call(reader, ">", PARAMETER, END_FUNCTION)):
            reader.reject()
        else:
            yield from reader.skip()
            yield from reader.literal(close)


def read_glm(reader: Reader) -> Reading:
    while (yield from reader.content_until(OPEN)):
        yield from reader.skip()
        if not (yield from read_call(reader, "", PAIR, CLOSE)):
            reader.reject()


def read_call(reader: Reader, name_end: str, tags: ArgumentTags, end: str) -> Waiting:
    """Read a name, what stands behind it, tagged arguments, and the mark behind these."""
    name = yield from reader.name()
    if not name or not (yield from reader.literal(name_end)):
        return False
    yield from reader.skip()
    if not (yield from reader.next_is(tags.name, end)):
        return False
    reader.start_call(name)
    parameters = next((tool.parameters for tool in reader.tools if tool.name == name), {})
    [key_end] = tags.name_ends
    before = "{"
    while (yield from reader.literal(tags.name)):
        key = yield from reader.until(key_end, MAX_NAME)
        if tags.value:
            yield from reader.skip()
        if key is None or not (yield from reader.literal(tags.value)):
            break
        yield from reader.literal(tags.line)
        reader.add_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        types = property_types(parameters, key) or tags.untyped
        if not (yield from read_typed(reader, types, tags.line + tags.end, tags.end)):
            return False
        yield from reader.skip()
    found = yield from reader.literal(end)
    if found or not reader.ended or (yield from reader.char()):  # else the text ends before the mark
        reader.add_arguments("{}" if before == "{" else "}")
    return found
