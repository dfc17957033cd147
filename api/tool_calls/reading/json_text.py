"""Read one JSON value from a text that comes in pieces, and pass on what is read of it."""

import re
from collections.abc import Callable

from api.tool_calls.reading.scanner import SPACE, Reader, Reading, Waiting

MAX_DEPTH = 64
MAX_NUMBER = 400
"""Characters of a number, which waits for its end."""
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
NUMBER_CHARS = frozenset("0123456789+-.eE")
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
"""Control characters that models write into strings, where JSON has escapes."""
Write = Callable[[str], None]


def read_value(reader: Reader, write: Write, depth: int = 0) -> Waiting:
    """Read a value. False where the text is none, with all before that place read."""
    if depth > MAX_DEPTH:
        return False
    match (yield from reader.char()):
        case "{":
            return (yield from read_object(reader, write, depth))
        case "[":
            return (yield from read_list(reader, write, depth))
        case '"':
            return (yield from read_string(reader, write))
        case "t" | "f" | "n" as first:
            word = {"t": "true", "f": "false", "n": "null"}[first]
            found = yield from reader.literal(word)
            if found:
                write(word)
            return found
        case _:
            return (yield from read_number(reader, write))


def read_object(reader: Reader, write: Write, depth: int = 0) -> Waiting:
    yield from pass_char(reader, write)
    if (yield from pass_if(reader, write, "}")):
        return True
    return (yield from read_members(reader, write, depth))


def read_members(reader: Reader, write: Write, depth: int = 0) -> Waiting:
    """Read the rest of an object, from the first of the keys to come."""
    while (yield from read_pair(reader, write, depth)):
        if (yield from pass_if(reader, write, "}")):
            return True
        if not (yield from pass_if(reader, write, ",")):
            return False
    return False


def read_pair(reader: Reader, write: Write, depth: int) -> Waiting:
    yield from pass_space(reader, write)
    if (yield from reader.char()) != '"' or not (yield from read_string(reader, write)):
        return False
    if not (yield from pass_if(reader, write, ":")):
        return False
    yield from pass_space(reader, write)
    return (yield from read_value(reader, write, depth + 1))


def read_list(reader: Reader, write: Write, depth: int = 0) -> Waiting:
    yield from pass_char(reader, write)
    if (yield from pass_if(reader, write, "]")):
        return True
    while True:
        yield from pass_space(reader, write)
        if not (yield from read_value(reader, write, depth + 1)):
            return False
        if (yield from pass_if(reader, write, "]")):
            return True
        if not (yield from pass_if(reader, write, ",")):
            return False


def read_string(reader: Reader, write: Write) -> Waiting:
    """Control characters are written as escapes."""
    yield from pass_char(reader, write)
    while char := (yield from reader.char()):
        if found := PLAIN.match(reader.text, reader.position):
            reader.position = found.end()
            write(found[0])
        elif char == "\\":
            if not (yield from read_escape(reader, write)):
                return False
        else:
            reader.position += 1
            write(ESCAPES.get(char) or (char if char == '"' else f"\\u{ord(char):04x}"))
            if char == '"':
                return True
    return False


def read_escape(reader: Reader, write: Write) -> Waiting:
    escape = yield from reader.peek(2)
    if escape == "\\u":
        escape = yield from reader.peek(6)
    if ESCAPE.fullmatch(escape) is None:
        return False
    reader.position += len(escape)
    write(escape)
    return True


def read_number(reader: Reader, write: Write) -> Waiting:
    word = ""
    while len(word) < MAX_NUMBER:
        longer = yield from reader.peek(len(word) + 1)
        if longer == word or longer[-1] not in NUMBER_CHARS:
            break
        word = longer
    if NUMBER.fullmatch(word) is None:
        return False
    reader.position += len(word)
    write(word)
    return True


def pass_char(reader: Reader, write: Write) -> Reading:
    write((yield from reader.char()))
    reader.position += 1


def pass_if(reader: Reader, write: Write, char: str) -> Waiting:
    """Pass on white space, and this character if it follows."""
    yield from pass_space(reader, write)
    found = (yield from reader.char()) == char
    if found:
        yield from pass_char(reader, write)
    return found


def pass_space(reader: Reader, write: Write) -> Reading:
    while (char := (yield from reader.char())) and char in SPACE:
        reader.position += 1
        write(char)
