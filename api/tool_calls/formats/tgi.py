"""TGI's calls, for models that know none of their own: a JSON object with the function's name among its
arguments, which a grammar forces.
"""

import json

from api.tool_calls.reading.call_object import add_whole_call, read_key, read_word
from api.tool_calls.reading.json_text import read_members, read_value
from api.tool_calls.reading.scanner import Scan, Scanner, Waiting

TGI_FUNCTION = "function"
TGI_NAME = "_name"


def read_tgi(scanner: Scanner) -> Scan:
    scanner.begin_mark()
    yield from scanner.skip()
    if not (yield from read_named_arguments(scanner)):
        scanner.reject()
    yield from scanner.content_until()


def read_named_arguments(scanner: Scanner) -> Waiting:
    """Read `{"function": {"_name": …, …}}`."""
    if not (yield from scanner.literal("{")) or (yield from read_key(scanner)) != TGI_FUNCTION:
        return False
    start = scanner.position
    if not (yield from scanner.literal("{")):
        return False
    if (yield from read_key(scanner)) != TGI_NAME:
        scanner.position = start
        found = yield from read_whole(scanner)
    else:
        found = yield from read_rest(scanner)
    if not found:
        return False
    yield from scanner.skip()
    return (yield from scanner.literal("}"))


def read_whole(scanner: Scanner) -> Waiting:
    """Read arguments among which the name is not the first."""
    pieces: list[str] = []
    if not (yield from read_value(scanner, pieces.append)):
        return False
    arguments = json.loads("".join(pieces))
    name = arguments.pop(TGI_NAME, None)
    return isinstance(name, str) and add_whole_call(scanner, name, json.dumps(arguments))


def read_rest(scanner: Scanner) -> Waiting:
    """Read the name, which is the first, and pass on the arguments after it."""
    name = yield from read_word(scanner)
    if not name:
        return False
    yield from scanner.skip()
    if (yield from scanner.literal("}")):
        return add_whole_call(scanner, name, "{}")
    if not (yield from scanner.literal(",")):
        return False
    yield from scanner.skip()
    if (yield from scanner.char()) != '"':
        return False
    scanner.start_call(name)
    scanner.add_arguments("{")
    return (yield from read_members(scanner, scanner.add_arguments))
