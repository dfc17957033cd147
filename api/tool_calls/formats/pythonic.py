"""Calls as Python: a list of calls with named arguments, as Llama 3.2, Llama 4 and LFM2 write them.

A list is one of calls only if it begins a line, or follows a mark, and names functions of the request.
"""

from collections.abc import Container

from api.tool_calls.reading.call_list import next_call, read_list
from api.tool_calls.reading.python_text import read_literal
from api.tool_calls.reading.scanner import Scan, Scanner, Waiting

LINE = "\n["


def read_pythonic(open: str, close: str, scanner: Scanner) -> Scan:
    """Read lists of calls; marks around them may be missing."""
    names = {tool.name for tool in scanner.tools}
    scanner.begin_mark()
    yield from scanner.skip()
    yield from scanner.literal(open)
    while True:
        yield from scanner.skip()
        if (yield from read_list(scanner, lambda: read_call_expression(scanner, names))):
            yield from scanner.skip()
            yield from scanner.literal(close)
            scanner.begin_mark()
        else:
            scanner.reject()
        if not (yield from next_call(scanner, open, LINE)):
            return


def read_call_expression(scanner: Scanner, names: Container[str]) -> Waiting:
    """Read `name(key=value, …)`."""
    name = yield from scanner.name()
    if name not in names or not (yield from scanner.literal("(")):
        return False
    yield from scanner.skip()
    if (yield from scanner.literal(")")):
        scanner.start_call(name)
        scanner.add_arguments("{}")
        return True
    before = "{"
    while True:
        key = yield from scanner.name()
        yield from scanner.skip()
        if not key or not (yield from scanner.literal("=")):
            return False
        yield from scanner.skip()
        if before == "{":
            scanner.start_call(name)
        value = yield from read_literal(scanner)
        if value is None:
            return False
        scanner.add_arguments(f'{before}"{key}": {value}')
        before = ", "
        if (yield from scanner.literal(",")):
            yield from scanner.skip()
        if (yield from scanner.literal(")")):
            scanner.add_arguments("}")
            return True
