"""Mistral's calls: a list of JSON objects after a mark; in newer models a mark, a name and arguments each."""

from api.tool_calls.formats.marked_json import read_calls
from api.tool_calls.reading.call_object import read_arguments
from api.tool_calls.reading.scanner import Reader, Reading, Waiting

CALLS = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"


def read_mistral(reader: Reader) -> Reading:
    while (yield from reader.content_until(CALLS)):
        yield from reader.skip()
        is_json = yield from reader.next_is("[{", "[ ", "[\n", "{")
        if not (yield from (read_calls(reader) if is_json else read_named(reader))):
            reader.reject()


def read_named(reader: Reader) -> Waiting:
    """Read a name, perhaps an id, and arguments."""
    name = yield from reader.name()
    if (yield from reader.literal(CALL_ID)):
        yield from reader.name()
    yield from reader.literal(ARGS)
    yield from reader.skip()
    if not name or not (yield from reader.next_is("{")):
        return False
    return (yield from read_arguments(reader, name))
