"""Calls that are JSON objects after a mark, one or a list of them."""

from api.tool_calls.reading.call_list import read_list
from api.tool_calls.reading.call_object import read_call
from api.tool_calls.reading.scanner import Scan, Scanner, Waiting


def read_marked_json(open: str, close: str, scanner: Scanner) -> Scan:
    """Read calls between two marks, of which models forget the second."""
    while (yield from scanner.content_until(open)):
        yield from scanner.skip()
        if (yield from read_calls(scanner)):
            yield from scanner.skip()
            yield from scanner.literal(close)
        else:
            scanner.reject()


def read_calls(scanner: Scanner) -> Waiting:
    """Read a call, or a list of them."""
    if (yield from scanner.char()) == "[":
        return (yield from read_list(scanner, lambda: read_call(scanner)))
    return (yield from read_call(scanner))
