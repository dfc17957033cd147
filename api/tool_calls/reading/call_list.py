"""Read a list of calls, and find where the next one may begin."""

from collections.abc import Callable

from api.tool_calls.reading.scanner import Reader, Waiting


def read_list(reader: Reader, read_one: Callable[[], Waiting]) -> Waiting:
    """Read calls between brackets, with commas between them. False where the text is none."""
    if not (yield from reader.literal("[")):
        return False
    while True:
        yield from reader.skip()
        if not (yield from read_one()):
            return False
        yield from reader.skip()
        if (yield from reader.literal("]")):
            return True
        if not (yield from reader.literal(",")):
            return False


def next_call(reader: Reader, mark: str, line: str) -> Waiting:
    """Pass on the content before a mark, which is read over, or before a line that begins as a call does.
    False at the end of the text.
    """
    if reader.is_either and not reader.num_calls:
        yield from reader.content_until()
        return False
    found = yield from reader.content_until(mark, line)
    if found == line:
        reader.position = 0
    return bool(found)
