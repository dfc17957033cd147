"""Calls that are JSON objects after a mark, one or a list of them."""

from api.tool_calls.reading.call_list import read_list
from api.tool_calls.reading.call_object import read_call
from api.tool_calls.reading.scanner import Reader, Reading, Waiting


def read_marked_json(open: str, close: str, reader: Reader) -> Reading:
    """Read calls between two marks, of which models forget the second."""
    while (yield from reader.content_until(open)):
        yield from reader.skip()
        if (yield from read_calls(reader)):
            yield from reader.skip()
            yield from reader.literal(close)
        else:
            reader.reject()


def read_calls(reader: Reader) -> Waiting:
    """Read a call, or a list of them."""
    if (yield from reader.char()) == "[":
        return (yield from read_list(reader, lambda: read_call(reader)))
    return (yield from read_call(reader))
