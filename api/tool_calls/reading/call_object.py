"""Read a call that is a JSON object with a name and arguments, the usual form of calls."""

import json
from collections.abc import Container, Generator

from api.tool_calls.reading.json_text import read_object, read_string, read_value
from api.tool_calls.reading.scanner import Scanner, Waiting

NAME = "name"
ARGUMENTS = ("arguments", "parameters")


def read_call(scanner: Scanner, names: Container[str] | None = None) -> Waiting:
    """Read a call. False where the text is none, or names a function that is not among `names`.

    Keys come in any order. Other keys are ignored.
    """
    name: str | None = None
    arguments: str | None = None
    begun = False
    if not (yield from scanner.literal("{")):
        return False
    while True:
        key = yield from read_key(scanner)
        if key is None:
            return False
        if key == NAME and name is None:
            name = yield from read_word(scanner)
            if not name or (names is not None and name not in names):
                return False
        elif key in ARGUMENTS and name is not None and not begun:
            begun = True
            if not (yield from read_arguments(scanner, name)):
                return False
        else:
            value: list[str] = []
            if not (yield from read_value(scanner, value.append)):
                return False
            if key in ARGUMENTS:
                arguments = "".join(value)
        yield from scanner.skip()
        if (yield from scanner.literal("}")):
            break
        if not (yield from scanner.literal(",")):
            return False
    return begun or (name is not None and add_whole_call(scanner, name, arguments or "{}"))


def read_key(scanner: Scanner) -> Generator[None, None, str | None]:
    """A key of an object, up to its value."""
    yield from scanner.skip()
    key = yield from read_word(scanner)
    yield from scanner.skip()
    if key is None or not (yield from scanner.literal(":")):
        return None
    yield from scanner.skip()
    return key


def read_word(scanner: Scanner) -> Generator[None, None, str | None]:
    """The text of a JSON string; None where there is none."""
    if (yield from scanner.char()) != '"':
        return None
    pieces: list[str] = []
    if not (yield from read_string(scanner, pieces.append)):
        return None
    word: str = json.loads("".join(pieces))
    return word if is_text(word) else None


def is_text(word: str) -> bool:
    """Whether it can be sent: half a surrogate pair cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in word)


def read_arguments(scanner: Scanner, name: str) -> Waiting:
    """Begin the call, and pass its arguments on as they come. Arguments that are no object are read whole
    before the call begins: some models write the object's JSON text as a string, or null.
    """
    if (yield from scanner.char()) == "{":
        scanner.start_call(name)
        return (yield from read_object(scanner, scanner.add_arguments))
    value: list[str] = []
    if not (yield from read_value(scanner, value.append)):
        return False
    return add_whole_call(scanner, name, "".join(value))


def add_whole_call(scanner: Scanner, name: str, arguments: str) -> bool:
    """Add a call whose arguments are a JSON text: an object, its text as a string, or null."""
    value = json.loads(arguments)
    if isinstance(value, str) and is_text(value):
        try:
            arguments, value = value, json.loads(value)
        except (ValueError, RecursionError):
            return False
    if value is None:
        arguments, value = "{}", {}
    if not isinstance(value, dict):
        return False
    scanner.start_call(name)
    scanner.add_arguments(arguments)
    return True
