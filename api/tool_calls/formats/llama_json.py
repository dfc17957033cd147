"""Llama 3's calls: JSON objects without marks around them, or after one.

A JSON object is a call only if it begins a line and names a function that the request offers.
"""

from api.tool_calls.reading.call_list import next_call
from api.tool_calls.reading.call_object import read_call
from api.tool_calls.reading.scanner import SPACE, Scan, Scanner

PYTHON_TAG = "<|python_tag|>"
LINE = "\n{"


def read_llama_json(scanner: Scanner) -> Scan:
    names = {tool.name for tool in scanner.tools}
    scanner.begin_mark()
    yield from scanner.skip()
    yield from scanner.literal(PYTHON_TAG)
    while True:
        yield from scanner.skip(SPACE + ";")
        if (yield from read_call(scanner, names)):
            scanner.begin_mark()
            continue
        scanner.reject()
        if not (yield from next_call(scanner, PYTHON_TAG, LINE)):
            return
