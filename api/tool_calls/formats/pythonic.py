"""Calls as Python: a list of calls with named arguments, as Llama 3.2, Llama 4 and LFM2 write them.

A list is one of calls only if it begins a line, or follows a mark, and names functions of the request.
"""

from collections.abc import Container

from api.tool_calls.reading.call_list import next_call, read_list
from api.tool_calls.reading.python_text import read_literal
from api.tool_calls.reading.scanner import Reader, Reading, Waiting

LINE = "\n["


def read_pythonic(open: str, close: str, reader: Reader) -> Reading:
    """Read lists of calls; marks around them may be missing."""
    names = {tool.name for tool in reader.tools}
    reader.begin_mark()
    yield from reader.skip()
    yield from reader.literal(open)
    while True:
        yield from reader.skip()
        if (yield from read_list(reader, lambda: read_call_expression(reader, names))):
            yield from reader.skip()
            yield from reader.literal(close)
            reader.begin_mark()
        else:
            reader.reject()
        if not (yield from next_call(reader, open, LINE)):
            return


def read_call_expression(reader: Reader, names: Container[str]) -> Waiting:
    """Read `name(key=value, …)`."""
    name = yield from reader.name()
    if name not in names or not (yield from reader.literal("(")):
        return False
    yield from reader.skip()
    if (yield from reader.literal(")")):
        reader.start_call(name)
        reader.add_arguments("{}")
        return True
    before = "{"
    while True:
        key = yield from reader.name()
        yield from reader.skip()
        if not key or not (yield from reader.literal("=")):
            return False
        yield from reader.skip()
        if before == "{":
            reader.start_call(name)
        value = yield from read_literal(reader)
        if value is None:
            return False
        reader.add_arguments(f'{before}"{key}": {value}')
        before = ", "
        if (yield from reader.literal(",")):
            yield from reader.skip()
        if (yield from reader.literal(")")):
            reader.add_arguments("}")
            return True
