"""Calls as Python: a list of calls with named arguments, as Llama 3.2, Llama 4 and LFM2 write them.

A list is one of calls only if it begins a line, or follows a mark, and names functions of the request.
"""

import ast
import json
from collections.abc import Container, Generator

from api.answers.json_calls import next_call, read_call_list
from api.answers.scanner import Scan, Scanner, Waiting

OPENING = "([{"
CLOSING = ")]}"
LIST_LINE = "\n["


def read_literal(scanner: Scanner) -> Generator[None, None, str | None]:
    """Read a value of Python up to the comma or bracket after it: its JSON text; None if it is no literal."""
    start, depth, quote = scanner.position, 0, ""
    while True:
        char = yield from scanner.char()
        if not char:
            return None
        if quote:
            if char == "\\":
                scanner.position += 1
                if not (yield from scanner.char()):
                    return None
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in OPENING:
            depth += 1
        elif depth == 0 and char in ",)]}":
            return literal_to_json(scanner.text[start : scanner.position])
        elif char in CLOSING:
            depth -= 1
        scanner.position += 1


def literal_to_json(text: str) -> str | None:
    """The JSON text of a literal of Python or JSON; None if the text is none."""
    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        pass
    else:
        return text.strip()
    try:
        return json.dumps(ast.literal_eval(text.strip()), allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def refuse(constant: str) -> None:
    """NaN and Infinity are no JSON."""
    raise ValueError(constant)


def read_pythonic(open: str, close: str, scanner: Scanner) -> Scan:
    """Read lists of calls; marks around them may be missing."""
    names = {tool.name for tool in scanner.tools}
    scanner.begin_mark()
    yield from scanner.skip()
    yield from scanner.literal(open)
    while True:
        yield from scanner.skip()
        if (yield from read_call_list(scanner, lambda: read_call_expression(scanner, names))):
            yield from scanner.skip()
            yield from scanner.literal(close)
            scanner.begin_mark()
        else:
            scanner.reject()
        if not (yield from next_call(scanner, open, LIST_LINE)):
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
