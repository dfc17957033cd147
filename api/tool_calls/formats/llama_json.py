"""Llama 3's calls: JSON objects without marks around them, or after one.

A JSON object is a call only if it begins a line and names a function that the request offers.
"""

from api.tool_calls.reading.call_list import next_call
from api.tool_calls.reading.call_object import read_call
from api.tool_calls.reading.scanner import SPACE, Reader, Reading

PYTHON_TAG = "<|python_tag|>"
LINE = "\n{"


def read_llama_json(reader: Reader) -> Reading:
    names = {tool.name for tool in reader.tools}
    reader.begin_mark()
    yield from reader.skip()
    yield from reader.literal(PYTHON_TAG)
    while True:
        yield from reader.skip(SPACE + ";")
        if (yield from read_call(reader, names)):
            reader.begin_mark()
            continue
        reader.reject()
        if not (yield from next_call(reader, PYTHON_TAG, LINE)):
            return
