"""Calls whose arguments are tagged texts: Qwen3-Coder's and GLM's."""

import json
from collections.abc import Mapping
from typing import Any

from api.tool_calls.reading.reader import MAX_NAME, Reader, Reading, Waiting
from api.tool_calls.reading.typed_text import property_types, read_typed

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
END_FUNCTION = "</function>"
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"
KEY = "<arg_key>"
END_KEY = "</arg_key>"
VALUE = "<arg_value>"
END_VALUE = "</arg_value>"
TEXT = frozenset(["string"])


def parameters_of(reader: Reader, name: str) -> Mapping[str, Any]:
    return next((tool.parameters for tool in reader.tools if tool.name == name), {})


def before_value(key: str, is_first: bool) -> str:
    return f"{'{' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: "


# --- Qwen3-Coder --------------------------------------------------------------------------------------------


def read_functions(open: str, close: str, reader: Reader) -> Reading:
    """Reads functions between two marks, which are missing at times."""
    while mark := (yield from reader.content_until(open, FUNCTION)):
        yield from reader.skip()
        has_begun = mark == FUNCTION or (yield from reader.literal(FUNCTION))
        if not has_begun or not (yield from read_function(reader)):
            reader.reject()
        else:
            yield from reader.skip()
            yield from reader.literal(close)


def read_function(reader: Reader) -> Waiting:
    name = yield from reader.name()
    if not name or not (yield from reader.literal(">")):
        return False
    yield from reader.skip()
    if not (yield from reader.next_is(PARAMETER, END_FUNCTION)):
        return False
    reader.start_call(name)
    is_first = True
    while (yield from reader.literal(PARAMETER)):
        key = yield from reader.until(">", MAX_NAME)
        if key is None:
            break
        yield from reader.literal("\n")
        reader.add_arguments(before_value(key, is_first))
        is_first = False
        types = property_types(parameters_of(reader, name), key) or TEXT
        if not (yield from read_typed(reader, types, "\n" + END_PARAMETER, END_PARAMETER)):
            return False
        yield from reader.skip()
    return (yield from end_call(reader, END_FUNCTION, is_first))


def end_call(reader: Reader, mark: str, is_empty: bool) -> Waiting:
    """Closes the arguments, unless the text ends before its mark."""
    found = yield from reader.literal(mark)
    if found or not reader.ended or (yield from reader.char()):
        reader.add_arguments("{}" if is_empty else "}")
    return found


# --- GLM ----------------------------------------------------------------------------------------------------


def read_glm(reader: Reader) -> Reading:
    while (yield from reader.content_until(OPEN)):
        yield from reader.skip()
        if not (yield from read_tagged_call(reader)):
            reader.reject()


def read_tagged_call(reader: Reader) -> Waiting:
    name = yield from reader.name()
    yield from reader.skip()
    if not name or not (yield from reader.next_is(KEY, CLOSE)):
        return False
    reader.start_call(name)
    is_first = True
    while (yield from reader.literal(KEY)):
        key = yield from reader.until(END_KEY, MAX_NAME)
        yield from reader.skip()
        if key is None or not (yield from reader.literal(VALUE)):
            break
        reader.add_arguments(before_value(key, is_first))
        is_first = False
        if not (yield from read_typed(reader, property_types(parameters_of(reader, name), key), END_VALUE)):
            return False
        yield from reader.skip()
    return (yield from end_call(reader, CLOSE, is_first))
