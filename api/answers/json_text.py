"""Read one JSON value from a text that comes in pieces, and pass on what is read of it."""

import re
from collections.abc import Callable

from api.answers.scanner import SPACE, Scan, Scanner, Waiting

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


def read_value(scanner: Scanner, write: Write, depth: int = 0) -> Waiting:
    """Read a value. False where the text is none, with all before that place read."""
    if depth > MAX_DEPTH:
        return False
    match (yield from scanner.char()):
        case "{":
            return (yield from read_object(scanner, write, depth))
        case "[":
            return (yield from read_list(scanner, write, depth))
        case '"':
            return (yield from read_string(scanner, write))
        case "t" | "f" | "n" as first:
            word = {"t": "true", "f": "false", "n": "null"}[first]
            found = yield from scanner.literal(word)
            if found:
                write(word)
            return found
        case _:
            return (yield from read_number(scanner, write))


def read_object(scanner: Scanner, write: Write, depth: int = 0) -> Waiting:
    yield from pass_char(scanner, write)
    if (yield from pass_if(scanner, write, "}")):
        return True
    return (yield from read_members(scanner, write, depth))


def read_members(scanner: Scanner, write: Write, depth: int = 0) -> Waiting:
    """Read the rest of an object, from the first of the keys to come."""
    while (yield from read_pair(scanner, write, depth)):
        if (yield from pass_if(scanner, write, "}")):
            return True
        if not (yield from pass_if(scanner, write, ",")):
            return False
    return False


def read_pair(scanner: Scanner, write: Write, depth: int) -> Waiting:
    yield from pass_space(scanner, write)
    if (yield from scanner.char()) != '"' or not (yield from read_string(scanner, write)):
        return False
    if not (yield from pass_if(scanner, write, ":")):
        return False
    yield from pass_space(scanner, write)
    return (yield from read_value(scanner, write, depth + 1))


def read_list(scanner: Scanner, write: Write, depth: int = 0) -> Waiting:
    yield from pass_char(scanner, write)
    if (yield from pass_if(scanner, write, "]")):
        return True
    while True:
        yield from pass_space(scanner, write)
        if not (yield from read_value(scanner, write, depth + 1)):
            return False
        if (yield from pass_if(scanner, write, "]")):
            return True
        if not (yield from pass_if(scanner, write, ",")):
            return False


def read_string(scanner: Scanner, write: Write) -> Waiting:
    """Control characters are written as escapes."""
    yield from pass_char(scanner, write)
    while char := (yield from scanner.char()):
        if found := PLAIN.match(scanner.text, scanner.position):
            scanner.position = found.end()
            write(found[0])
        elif char == "\\":
            if not (yield from read_escape(scanner, write)):
                return False
        else:
            scanner.position += 1
            write(ESCAPES.get(char) or (char if char == '"' else f"\\u{ord(char):04x}"))
            if char == '"':
                return True
    return False


def read_escape(scanner: Scanner, write: Write) -> Waiting:
    escape = yield from scanner.peek(2)
    if escape == "\\u":
        escape = yield from scanner.peek(6)
    if ESCAPE.fullmatch(escape) is None:
        return False
    scanner.position += len(escape)
    write(escape)
    return True


def read_number(scanner: Scanner, write: Write) -> Waiting:
    word = ""
    while len(word) < MAX_NUMBER:
        longer = yield from scanner.peek(len(word) + 1)
        if longer == word or longer[-1] not in NUMBER_CHARS:
            break
        word = longer
    if NUMBER.fullmatch(word) is None:
        return False
    scanner.position += len(word)
    write(word)
    return True


def pass_char(scanner: Scanner, write: Write) -> Scan:
    write((yield from scanner.char()))
    scanner.position += 1


def pass_if(scanner: Scanner, write: Write, char: str) -> Waiting:
    """Pass on white space, and this character if it follows."""
    yield from pass_space(scanner, write)
    found = (yield from scanner.char()) == char
    if found:
        yield from pass_char(scanner, write)
    return found


def pass_space(scanner: Scanner, write: Write) -> Scan:
    while (char := (yield from scanner.char())) and char in SPACE:
        scanner.position += 1
        write(char)
