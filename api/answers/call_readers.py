"""Readers of calls: the text of an answer, read as its format says that calls are written.

White space may be another than the format's, keys of an object may come in any order, and marks after the
arguments may be missing. A reader passes arguments on as they come. Harmony's answers are messages, which
have a reader of their own.
"""

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from api.answers.call_formats import (
    CHANNEL,
    ENDS,
    FUNCTIONS,
    HARMONY,
    MESSAGE,
    PAIR,
    PARAMETER,
    START,
    ArgumentTags,
    CallFormat,
    ReasoningFormat,
    Writing,
)
from api.answers.scanner import (
    MAX_NAME,
    PYTHON,
    Scan,
    Scanner,
    Waiting,
    is_json_text,
    read_string,
    read_value,
)

ARGUMENT_KEYS = ("arguments", "parameters")
PARTS = re.compile(r'(\{"name".*?\}|\$\w+)')
"""What a reader of its own reads, in the text of a call."""
WORDS = re.compile(r"<[^<>]*>|\w+|[^\w\s]")
"""What white space may divide, in the text of a format."""
NUMBER_OF_CALL = re.compile(r":[0-9]+$")


def read_reasoning(scanner: Scanner, form: ReasoningFormat, begins_inside: bool) -> Scan:
    """Read thinking, if the answer begins with it."""
    yield from scanner.skip()
    if not (yield from scanner.literal(form.open)) and not begins_inside:
        scanner.position = 0
        return
    scanner.forget(scanner.position)
    scanner.trim()
    yield from scanner.pass_until(scanner.add_reasoning, form.close)
    scanner.trim()


def read_calls(form: CallFormat, scanner: Scanner) -> Scan:
    """Read calls after marks, and what begins as a call without one does."""
    if form.name == HARMONY:
        yield from read_harmony(scanner)
        return
    if form.begins_lines:
        scanner.names = {tool.name for tool in scanner.tools} or None
    marks = {one.mark for one in form.writings if one.mark}
    scanner.begin_mark()
    yield from scanner.skip()
    is_marked = False
    for mark in marks:
        is_marked = is_marked or (yield from scanner.literal(mark))
    is_start = is_marked or (form.unmarked != "" and (yield from scanner.next_is(form.unmarked)))
    while True:
        if not is_start or not (yield from read_group(form, is_marked, scanner)):
            scanner.reject()
        if scanner.is_either and not scanner.num_calls:
            break
        found = yield from scanner.content_until(*marks, *form.starts)
        is_start, is_marked = bool(found), found in marks
        if not is_start:
            return
        if not is_marked:
            scanner.position = 0
    yield from scanner.content_until()


def read_group(form: CallFormat, is_marked: bool, scanner: Scanner) -> Waiting:
    """Read a call, or several in a row, in the first writing that fits."""
    start = scanner.position
    for writing in form.writings:
        scanner.position = start
        num_read = 0
        is_open = yield from read_if(scanner, writing.open)
        while (is_open or is_marked) and (yield from read_written(writing, scanner)):
            num_read += 1
            scanner.begin_mark()
            is_open = is_marked = bool(writing.separator)
            yield from read_if(scanner, writing.separator)
        if scanner.committed:
            return False
        if num_read:
            scanner.position = 0  # after the last call
            yield from read_ends(scanner, WORDS.findall(writing.close))
            scanner.begin_mark()
            return True
    return False


def read_written(writing: Writing, scanner: Scanner) -> Waiting:
    """Read a call in this writing."""
    *pieces, end = PARTS.split(writing.call)
    name, ends = "", WORDS.findall(end)
    for i, piece in enumerate(pieces):
        if i % 2 == 0:
            is_read = yield from read_text(scanner, piece)
        elif piece in NAMES:
            yield from scanner.skip()
            name = NAMES[piece]((yield from scanner.name()))
            is_read = may_call(scanner, name)
        else:
            read_part = READERS.get(piece, read_object)
            is_read = yield from read_part(scanner, name, ends)
        if not is_read:
            return False
    yield from read_ends(scanner, ends)
    return True


def may_call(scanner: Scanner, name: str | None) -> bool:
    return bool(name) and (scanner.names is None or name in scanner.names)


def read_text(scanner: Scanner, text: str) -> Waiting:
    """Read a text of a format, with any white space in it."""
    for word in WORDS.findall(text):
        yield from scanner.skip()
        if not (yield from scanner.literal(word)):
            return False
    return True


def read_if(scanner: Scanner, word: str) -> Waiting:
    """Read a word, and the white space before it, if they follow."""
    start = scanner.position
    is_read = yield from read_text(scanner, word)
    if not is_read:
        scanner.position = start
    return is_read


def read_ends(scanner: Scanner, ends: Sequence[str]) -> Scan:
    """Read over the marks that may follow a call; models forget them."""
    for end in ends:
        yield from read_if(scanner, end)


# --- objects ------------------------------------------------------------------------------------------------


def read_object(scanner: Scanner, _name: str, _ends: Sequence[str]) -> Waiting:
    """Read an object with a name and arguments, in any order; other keys are ignored."""
    name, arguments, begun = "", "{}", False
    if not (yield from read_text(scanner, "{")):
        return False
    while True:
        key = yield from read_key(scanner)
        if key is None:
            return False
        if key == "name" and not name:
            name = (yield from read_name(scanner)) or ""
            if not may_call(scanner, name):
                return False
        elif key in ARGUMENT_KEYS and name and not begun:
            begun = True
            if not (yield from read_arguments(scanner, name)):
                return False
        else:
            value: list[str] = []
            if not (yield from read_value(scanner, value.append)):
                return False
            if key in ARGUMENT_KEYS:
                arguments = "".join(value)
        if (yield from read_text(scanner, "}")):
            break
        if not (yield from scanner.literal(",")):
            return False
    return begun or (name != "" and add_whole_call(scanner, name, arguments))


def read_key(scanner: Scanner) -> Generator[None, None, str | None]:
    """A key of an object, up to its value."""
    yield from scanner.skip()
    key = yield from read_name(scanner)
    if key is None or not (yield from read_text(scanner, ":")):
        return None
    yield from scanner.skip()
    return key


def read_name(scanner: Scanner) -> Generator[None, None, str | None]:
    """The text of a JSON string; None where there is none."""
    pieces: list[str] = []
    if (yield from scanner.char()) != '"' or not (yield from read_string(scanner, pieces.append)):
        return None
    word: Any = loads("".join(pieces))
    return word if word is not None and is_text(word) else None


def loads(text: str) -> Any:
    """The value of a JSON text; None if it is none."""
    return json.loads(text) if is_json_text(text) else None


def is_text(word: str) -> bool:
    """Whether it can be sent: half a surrogate pair cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in word)


def read_arguments(scanner: Scanner, name: str, ends: Sequence[str] = ()) -> Waiting:
    """Begin the call, and pass its arguments on as they come. Arguments that are no object are read whole
    before the call begins: some models write the object's JSON text as a string, null, or nothing.
    """
    yield from scanner.skip()
    if ends and (yield from scanner.next_is(*ends)):
        return add_whole_call(scanner, name, "{}")
    if (yield from scanner.char()) == "{":
        scanner.start_call(name)
        return (yield from read_value(scanner, scanner.add_arguments))
    value: list[str] = []
    if not (yield from read_value(scanner, value.append)):
        return False
    return add_whole_call(scanner, name, "".join(value))


def add_whole_call(scanner: Scanner, name: str, arguments: str) -> bool:
    """Add a call whose arguments are a JSON text: an object, its text as a string, or null."""
    value = loads(arguments)
    if isinstance(value, str) and is_text(value):
        arguments, value = value, loads(value)
    if arguments.strip() == "null":
        arguments, value = "{}", {}
    if not isinstance(value, dict):
        return False
    scanner.start_call(name)
    scanner.add_arguments(arguments)
    return True


# --- Python -------------------------------------------------------------------------------------------------


def read_keywords(scanner: Scanner, name: str, ends: Sequence[str]) -> Waiting:
    """Read arguments as in Python, up to the bracket after them."""
    [end] = ends
    if (yield from read_if(scanner, end)):
        return add_whole_call(scanner, name, "{}")
    before = "{"
    while True:
        yield from scanner.skip()
        key = yield from scanner.name()
        if not key or not (yield from read_text(scanner, "=")):
            return False
        yield from scanner.skip()
        if before == "{":
            scanner.start_call(name)
        start, pieces = scanner.position, list[str]()
        yield from read_value(scanner, pieces.append, PYTHON)
        value = literal_to_json("".join(pieces))
        if value is None:
            scanner.position = start
            return False
        scanner.add_arguments(f'{before}"{key}": {value}')
        before = ", "
        yield from read_if(scanner, ",")
        if (yield from read_if(scanner, end)):
            scanner.add_arguments("}")
            return True


def literal_to_json(text: str) -> str | None:
    """The JSON text of a literal of Python or JSON; None if the text is none."""
    if is_json_text(text):
        return text.strip()
    try:
        return json.dumps(ast.literal_eval(text.strip()), allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


# --- arguments between tags ---------------------------------------------------------------------------------

JSON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
MAX_REFERENCES = 64
"""How many references of a schema are followed."""


def read_tagged(tags: ArgumentTags, scanner: Scanner, name: str, ends: Sequence[str]) -> Waiting:
    """Read tagged arguments, and the mark after them."""
    end = ends[0]
    yield from scanner.skip()
    if not (yield from scanner.next_is(tags.name, end)):
        return False
    scanner.start_call(name)
    parameters = next((tool.parameters for tool in scanner.tools if tool.name == name), {})
    before = "{"
    awaited: tuple[str, ...] = (tags.name, end)
    while (yield from scanner.literal(tags.name)):
        key = yield from scanner.until(tags.name_end, MAX_NAME)
        if key is None:
            if scanner.ended and len(scanner.text) - scanner.position <= MAX_NAME:
                return False
            break
        if tags.value:
            yield from scanner.skip()
        if not (yield from scanner.literal(tags.value)):
            awaited = (tags.value,)
            break
        yield from scanner.literal(tags.line)
        scanner.add_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        types = property_types(parameters, key) or tags.untyped
        if not (yield from read_typed(scanner, types, tags.line + tags.end, tags.end)):
            return False
        yield from scanner.skip()
    found = yield from scanner.literal(end)
    rest = scanner.text[scanner.position :]
    if found or not scanner.ended or not any(mark.startswith(rest) for mark in awaited):
        scanner.add_arguments("{}" if before == "{" else "}")  # else the text ends before the mark
    return found


def read_typed(scanner: Scanner, types: frozenset[str], *marks: str) -> Generator[None, None, str]:
    """Read a value up to one of the marks, and add it to the arguments of the call. A text is passed on as it
    comes, other values when they are whole. A mark within a JSON string does not end the value.
    """
    if types == {"string"}:
        scanner.add_arguments('"')
        mark = yield from scanner.pass_until(
            lambda text: scanner.add_arguments(json.dumps(text, ensure_ascii=False)[1:-1]), *marks
        )
        if mark:
            scanner.add_arguments('"')
        return mark
    start = scanner.position
    pieces: list[str] = []
    yield from scanner.skip()
    is_json = yield from read_value(scanner, pieces.append)
    yield from scanner.skip()
    if not is_json or not (yield from scanner.next_is(*marks)):
        scanner.position = start
        pieces.clear()
    mark = yield from scanner.pass_until(pieces.append, *marks)
    if mark:
        scanner.add_arguments(typed("".join(pieces), types))
    return mark


def typed(text: str, types: frozenset[str]) -> str:
    """A value of one of these types as JSON; a text where it is none of them."""
    value = literal_to_json(text)
    if value is not None and (not types or is_of(json.loads(value), types)):
        return value
    return json.dumps(text, ensure_ascii=False)


def is_of(value: Any, types: frozenset[str]) -> bool:
    name = JSON_TYPES[type(value)]
    return name in types or (name == "integer" and "number" in types)


def property_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """The types that a schema allows for a property; none if it does not say."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return types_of(schema, parameters, {})


def types_of(schema: Any, root: Mapping[str, Any], known: dict[str, frozenset[str]]) -> frozenset[str]:
    """The types that a schema allows; none if it does not say, or by too many references. Each of these is
    followed once, and is in `known` then.
    """
    if not isinstance(schema, Mapping):
        return frozenset()
    if isinstance(kind := schema.get("type"), str | list):
        return frozenset([kind] if isinstance(kind, str) else [one for one in kind if isinstance(one, str)])
    if isinstance(path := schema.get("$ref"), str):
        if path not in known and len(known) < MAX_REFERENCES:
            known[path] = frozenset()  # what refers to itself
            known[path] = types_of(resolve_reference(path, root), root, known)
        return known.get(path, frozenset())
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(JSON_TYPES[type(value)] for value in values if type(value) in JSON_TYPES)
    lists = (schema.get(key) for key in ("anyOf", "oneOf", "allOf"))
    found = [types_of(part, root, known) for one in lists if isinstance(one, list) for part in one]
    return frozenset().union(*found) if all(found) else frozenset()


def resolve_reference(path: str, root: Mapping[str, Any]) -> Any:
    """The schema at a reference `#/…` inside of the parameters."""
    value: Any = root
    for key in unquote(path).removeprefix("#").split("/")[1:]:
        value = value.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
    return value


def read_call_id(scanner: Scanner, _name: str, _ends: Sequence[str]) -> Waiting:
    return bool((yield from scanner.name()))


READERS: Mapping[str, Callable[[Scanner, str, Sequence[str]], Waiting]] = {
    "$arguments": read_arguments,
    "$keywords": read_keywords,
    "$parameters": partial(read_tagged, PARAMETER),
    "$pairs": partial(read_tagged, PAIR),
    "$call_id": read_call_id,
}
"""Parts of a call → (scanner, the function's name, the marks after the part) → whether it was read."""
NAMES: Mapping[str, Callable[[str], str]] = {
    "$name": str,
    "$id": lambda word: NUMBER_OF_CALL.sub("", word.removeprefix(FUNCTIONS)),
}
"""Parts of a call that have its function's name → the name in their word."""


# --- Harmony ------------------------------------------------------------------------------------------------

MAX_HEADER = 512
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
NAME_OF_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
PARAGRAPH = "\n\n"


def read_harmony(scanner: Scanner) -> Scan:
    """Read messages: those to functions are calls, analysis is reasoning, other text is content."""
    said: set[str] = set()
    scanner.begin_mark()
    while (yield from scanner.char()):
        yield from scanner.skip()
        is_message = yield from scanner.next_is(START, CHANNEL, "to=", "assistant")
        header = (yield from scanner.until(MESSAGE, MAX_HEADER)) if is_message else None
        if header is None:
            scanner.reject()
            yield from scanner.content_until(START, CHANNEL)
            scanner.position = 0
            continue
        recipient, channel = ("".join(one.findall(header)[:1]) for one in (RECIPIENT, NAME_OF_CHANNEL))
        if not recipient.startswith(FUNCTIONS):
            is_reasoning = recipient or channel == "analysis"
            yield from read_body(scanner, "reasoning" if is_reasoning else "content", said)
        elif (yield from read_arguments(scanner, recipient.removeprefix(FUNCTIONS), ENDS)):
            yield from read_ends(scanner, ENDS)
        else:
            scanner.reject()
            yield from read_body(scanner, "content", set())
        scanner.begin_mark()


def read_body(scanner: Scanner, kind: str, said: set[str]) -> Scan:
    """Read a message's text. A blank line divides it from earlier text of its kind.

    Args:
        said: the kinds of text that the answer has so far; this one is added.
    """
    scanner.trim()
    if kind in said:
        scanner.space = PARAGRAPH
        scanner.trims = False
    write = scanner.add_reasoning if kind == "reasoning" else scanner.add_content
    mark = yield from scanner.pass_until(write, *ENDS, START, CHANNEL)
    if not scanner.trims:
        said.add(kind)
    scanner.trim()
    if mark not in ENDS:
        scanner.position -= len(mark)
