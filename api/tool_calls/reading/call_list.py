"""Read a list of calls, and find where the next one may begin."""

from collections.abc import Callable

from api.tool_calls.reading.scanner import Scanner, Waiting


def read_list(scanner: Scanner, read_one: Callable[[], Waiting]) -> Waiting:
    """Read calls between brackets, with commas between them. False where the text is none."""
    if not (yield from scanner.literal("[")):
        return False
    while True:
        yield from scanner.skip()
        if not (yield from read_one()):
            return False
        yield from scanner.skip()
        if (yield from scanner.literal("]")):
            return True
        if not (yield from scanner.literal(",")):
            return False


def next_call(scanner: Scanner, mark: str, line: str) -> Waiting:
    """Pass on the content before a mark, which is read over, or before a line that begins as a call does.
    False at the end of the text.
    """
    if scanner.is_either and not scanner.num_calls:
        yield from scanner.content_until()
        return False
    found = yield from scanner.content_until(mark, line)
    if found == line:
        scanner.position = 0
    return bool(found)
