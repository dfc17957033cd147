"""Mistral's calls: a list of JSON objects after a mark; in newer models a mark, a name and arguments each."""

from api.tool_calls.formats.marked_json import read_calls
from api.tool_calls.reading.call_object import read_arguments
from api.tool_calls.reading.scanner import Scan, Scanner, Waiting

TOOL_CALLS = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"


def read_mistral(scanner: Scanner) -> Scan:
    while (yield from scanner.content_until(TOOL_CALLS)):
        yield from scanner.skip()
        is_json = yield from scanner.next_is("[{", "[ ", "[\n", "{")
        if not (yield from (read_calls(scanner) if is_json else read_named(scanner))):
            scanner.reject()


def read_named(scanner: Scanner) -> Waiting:
    """Read a name, perhaps an id, and arguments."""
    name = yield from scanner.name()
    if (yield from scanner.literal(CALL_ID)):
        yield from scanner.name()
    yield from scanner.literal(ARGS)
    yield from scanner.skip()
    if not name or not (yield from scanner.next_is("{")):
        return False
    return (yield from read_arguments(scanner, name))
