"""TGI's calls, for models that know none of their own: a JSON object with the function's name among its
arguments, which a grammar forces.
"""

import json

from api.tool_calls.reading.call_object import add_whole_call, read_key, read_word
from api.tool_calls.reading.json_text import read_members, read_value
from api.tool_calls.reading.scanner import Reader, Reading, Waiting

FUNCTION = "function"
NAME = "_name"


def read_tgi(reader: Reader) -> Reading:
    reader.begin_mark()
    yield from reader.skip()
    if not (yield from read_named_arguments(reader)):
        reader.reject()
    yield from reader.content_until()


def read_named_arguments(reader: Reader) -> Waiting:
    """Read `{"function": {"_name": …, …}}`."""
    if not (yield from reader.literal("{")) or (yield from read_key(reader)) != FUNCTION:
        return False
    start = reader.position
    if not (yield from reader.literal("{")):
        return False
    if (yield from read_key(reader)) != NAME:
        reader.position = start
        found = yield from read_whole(reader)
    else:
        found = yield from read_rest(reader)
    if not found:
        return False
    yield from reader.skip()
    return (yield from reader.literal("}"))


def read_whole(reader: Reader) -> Waiting:
    """Read arguments among which the name is not the first."""
    pieces: list[str] = []
    if not (yield from read_value(reader, pieces.append)):
        return False
    arguments = json.loads("".join(pieces))
    name = arguments.pop(NAME, None)
    return isinstance(name, str) and add_whole_call(reader, name, json.dumps(arguments))


def read_rest(reader: Reader) -> Waiting:
    """Read the name, which is the first, and pass on the arguments behind it."""
    name = yield from read_word(reader)
    if not name:
        return False
    yield from reader.skip()
    if (yield from reader.literal("}")):
        return add_whole_call(reader, name, "{}")
    if not (yield from reader.literal(",")):
        return False
    yield from reader.skip()
    if (yield from reader.char()) != '"':
        return False
    reader.start_call(name)
    reader.add_arguments("{")
    return (yield from read_members(reader, reader.add_arguments))
