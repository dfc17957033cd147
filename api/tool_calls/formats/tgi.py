"""TGI's calls, for models that know none of their own: a JSON object with the function's name among its
arguments, which a grammar forces.
"""

from collections.abc import Generator, Sequence

from api.tool_calls.reading.call_object import add_whole_call, read_key, read_word
from api.tool_calls.reading.deltas import Tool
from api.tool_calls.reading.json_text import read_members
from api.tool_calls.reading.reader import Reader, Waiting

FUNCTION = "function"
NAME = "_name"


def read_tgi(reader: Reader, tools: Sequence[Tool]) -> Generator[None, None, None]:
    reader.begin_mark("")
    yield from reader.skip()
    if not (yield from read_named_arguments(reader)):
        reader.reject()
    yield from reader.content_until()


def read_named_arguments(reader: Reader) -> Waiting:
    """Reads `{"function": {"_name": …, …}}`."""
    if not (yield from reader.literal("{")) or (yield from read_key(reader)) != FUNCTION:
        return False
    if not (yield from reader.literal("{")) or (yield from read_key(reader)) != NAME:
        return False
    name = yield from read_word(reader)
    if not name:
        return False
    yield from reader.skip()
    if (yield from reader.literal("}")):
        add_whole_call(reader, name, "{}")
    elif not (yield from reader.literal(",")):
        return False
    else:
        yield from reader.skip()
        if (yield from reader.char()) != '"':
            return False
        reader.start_call(name)
        reader.add_arguments("{")
        if not (yield from read_members(reader, reader.add_arguments)):
            return False
    yield from reader.skip()
    return (yield from reader.literal("}"))
