"""Readers of calls: how the text of an answer is read in each format, with the marks of the format.

Calls are objects of JSON after a mark, in lists, on lines of their own, or in sections. Others are lists as
in Python, or have their arguments between tags. A reader passes arguments on as they come.
"""

import ast
import json
import re
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from api.answers.scanner import (
    MAX_NAME,
    SPACE,
    Scan,
    Scanner,
    Waiting,
    read_members,
    read_object,
    read_string,
    read_value,
)

PYTHON_TAG = "<|python_tag|>"
NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")


def read_call(scanner: Scanner, names: Container[str] | None = None) -> Waiting:
    """Read a call: an object with a name and arguments, in any order; other keys are ignored. False where the
    text is no call, or names a function that is not among `names`.
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
        if key == NAME_KEY and name is None:
            name = yield from read_word(scanner)
            if not name or (names is not None and name not in names):
                return False
        elif key in ARGUMENT_KEYS and name is not None and not begun:
            begun = True
            if not (yield from read_arguments(scanner, name)):
                return False
        else:
            value: list[str] = []
            if not (yield from read_value(scanner, value.append)):
                return False
            if key in ARGUMENT_KEYS:
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


def read_call_list(scanner: Scanner, read_one: Callable[[], Waiting]) -> Waiting:
    """Read calls between brackets, with commas between them. False where the text is no such list."""
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
    """Pass on the content up to the next mark, which is read over, or up to a line that begins like a call.
    False at the end of the text.
    """
    if scanner.is_either and not scanner.num_calls:
        yield from scanner.content_until()
        return False
    found = yield from scanner.content_until(mark, line)
    if found == line:
        scanner.position = 0
    return bool(found)


def read_lines(
    read_one: Callable[[Scanner, Container[str]], Waiting],
    open: str,
    ends: Sequence[str],
    line: str,
    between: str,
    scanner: Scanner,
) -> Scan:
    """Read calls of functions that the request offers: at the beginning of the answer or of a line, or after
    the mark `open`. With `between`, there may be several on a line.
    """
    names = {tool.name for tool in scanner.tools}
    scanner.begin_mark()
    yield from scanner.skip()
    yield from scanner.literal(open)
    while True:
        yield from scanner.skip(SPACE + between)
        if (yield from read_one(scanner, names)):
            yield from read_ends(scanner, ends)
            scanner.begin_mark()
            if between:
                continue
        else:
            scanner.reject()
        if not (yield from next_call(scanner, open, line)):
            return


def read_marked(
    marks: Sequence[str], read_one: Callable[[Scanner, str], Waiting], ends: Sequence[str], scanner: Scanner
) -> Scan:
    """Read calls after one of the marks; `read_one` gets the mark."""
    while mark := (yield from scanner.content_until(*marks)):
        yield from scanner.skip()
        if (yield from read_one(scanner, mark)):
            yield from read_ends(scanner, ends)
        else:
            scanner.reject()


def read_ends(scanner: Scanner, ends: Sequence[str]) -> Scan:
    """Read over the marks that may follow a call; models forget them."""
    for end in ends:
        yield from scanner.skip()
        yield from scanner.literal(end)


def read_calls(scanner: Scanner, mark: str = "") -> Waiting:
    """Read a call, or a list of them."""
    if (yield from scanner.char()) == "[":
        return (yield from read_call_list(scanner, lambda: read_call(scanner)))
    return (yield from read_call(scanner))


# --- Mistral ------------------------------------------------------------------------------------------------

TOOL_CALLS = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"


def read_mistral(scanner: Scanner, mark: str) -> Waiting:
    """Read a list of objects after a mark; of newer models a mark, a name and arguments for each call."""
    is_json = yield from scanner.next_is("[{", "[ ", "[\n", "{")
    return (yield from (read_calls(scanner) if is_json else read_mistral_call(scanner)))


def read_mistral_call(scanner: Scanner) -> Waiting:
    """Read a name, perhaps an id, and arguments."""
    name = yield from scanner.name()
    if (yield from scanner.literal(CALL_ID)):
        yield from scanner.name()
    yield from scanner.literal(ARGS)
    yield from scanner.skip()
    if not name or not (yield from scanner.next_is("{")):
        return False
    return (yield from read_arguments(scanner, name))


# --- DeepSeek and Kimi --------------------------------------------------------------------------------------


class SectionMarks(NamedTuple):
    """The marks around all calls, around one, and before its arguments."""

    calls_begin: str
    call_begin: str
    arguments_begin: str
    call_end: str
    calls_end: str


DEEPSEEK = SectionMarks(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI = SectionMarks(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
FUNCTIONS = "functions."
FENCE = "```"
"""DeepSeek V3 and R1 write the type `function` before the mark, and the name and a fence after it."""


def read_section(marks: SectionMarks, scanner: Scanner, mark: str) -> Waiting:
    """Read a call up to its arguments' end, with marks before it and between name and arguments."""
    if mark != marks.call_begin and not (yield from scanner.literal(marks.call_begin)):
        return False
    head = yield from scanner.until(marks.arguments_begin, MAX_NAME)
    if head is None:
        return False
    name = head.strip()
    if name == "function":
        yield from scanner.skip()
        name = yield from scanner.name()
    yield from scanner.skip()
    if (yield from scanner.literal(FENCE)):
        yield from scanner.literal("json")
        yield from scanner.skip()
    if name.startswith(FUNCTIONS):  # as Kimi writes it, with the call's number after it
        name = name.removeprefix(FUNCTIONS).split(":")[0]
    return bool(name) and (yield from read_arguments(scanner, name))


# --- TGI ----------------------------------------------------------------------------------------------------

TGI_FUNCTION = "function"
TGI_NAME = "_name"


def read_tgi(scanner: Scanner) -> Scan:
    """Read the call of a model that knows no calls: a grammar forces an object with the function's name among
    its arguments.
    """
    scanner.begin_mark()
    yield from scanner.skip()
    if not (yield from read_tgi_call(scanner)):
        scanner.reject()
    yield from scanner.content_until()


def read_tgi_call(scanner: Scanner) -> Waiting:
    """Read `{"function": {"_name": …, …}}`."""
    if not (yield from scanner.literal("{")) or (yield from read_key(scanner)) != TGI_FUNCTION:
        return False
    start = scanner.position
    if not (yield from scanner.literal("{")):
        return False
    if (yield from read_key(scanner)) != TGI_NAME:
        scanner.position = start
        found = yield from read_with_later_name(scanner)
    else:
        found = yield from read_with_first_name(scanner)
    if not found:
        return False
    yield from scanner.skip()
    return (yield from scanner.literal("}"))


def read_with_later_name(scanner: Scanner) -> Waiting:
    """Read arguments of which the name is not the first."""
    pieces: list[str] = []
    if not (yield from read_value(scanner, pieces.append)):
        return False
    arguments = json.loads("".join(pieces))
    name = arguments.pop(TGI_NAME, None)
    return isinstance(name, str) and add_whole_call(scanner, name, json.dumps(arguments))


def read_with_first_name(scanner: Scanner) -> Waiting:
    """Read the name, and pass on the arguments after it."""
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


# --- Python -------------------------------------------------------------------------------------------------

OPENING = "([{"
CLOSING = ")]}"


def read_literal(scanner: Scanner) -> Generator[None, None, str | None]:
    """Read a value of Python up to the comma or bracket after it: its JSON text; None if it is no literal."""
    start, depth, quote = scanner.position, 0, ""
    while True:
        char = yield from scanner.char()
        if not char:
            return None
        if quote:
            if char == "\\":
                scanner.position += 1
                if not (yield from scanner.char()):
                    return None
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in OPENING:
            depth += 1
        elif depth == 0 and char in ",)]}":
            return literal_to_json(scanner.text[start : scanner.position])
        elif char in CLOSING:
            depth -= 1
        scanner.position += 1


def literal_to_json(text: str) -> str | None:
    """The JSON text of a literal of Python or JSON; None if the text is none."""
    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        pass
    else:
        return text.strip()
    try:
        return json.dumps(ast.literal_eval(text.strip()), allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def refuse(constant: str) -> None:
    """NaN and Infinity are no JSON."""
    raise ValueError(constant)


def read_python_list(scanner: Scanner, names: Container[str]) -> Waiting:
    """Read `[name(key=value, …), …]`."""
    return read_call_list(scanner, lambda: read_call_expression(scanner, names))


def read_call_expression(scanner: Scanner, names: Container[str]) -> Waiting:
    """Read `name(key=value, …)`."""
    name = yield from scanner.name()
    if name not in names or not (yield from scanner.literal("(")):
        return False
    yield from scanner.skip()
    if (yield from scanner.literal(")")):
        scanner.start_call(name)
        scanner.add_arguments("{}")
        return True
    before = "{"
    while True:
        key = yield from scanner.name()
        yield from scanner.skip()
        if not key or not (yield from scanner.literal("=")):
            return False
        yield from scanner.skip()
        if before == "{":
            scanner.start_call(name)
        value = yield from read_literal(scanner)
        if value is None:
            return False
        scanner.add_arguments(f'{before}"{key}": {value}')
        before = ", "
        if (yield from scanner.literal(",")):
            yield from scanner.skip()
        if (yield from scanner.literal(")")):
            scanner.add_arguments("}")
            return True


# --- Qwen3-Coder and GLM ------------------------------------------------------------------------------------

TOOL_CALL = "<tool_call>"
END_TOOL_CALL = "</tool_call>"
FUNCTION = "<function="
END_FUNCTION = "</function>"
JSON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
MAX_REFERENCES = 8
"""How many references of a schema are followed."""


class ArgumentTags(NamedTuple):
    """What stands around the name of an argument and its value.

    Attributes:
        name_end: follows the name.
        value: follows `name_end`, after white space; "" if the value follows at once.
        line: what else divides tags and value, where the model writes it.
        untyped: the types of a parameter for which the schema says none.
    """

    name: str
    name_end: str
    value: str
    end: str
    line: str = ""
    untyped: frozenset[str] = frozenset()


PARAMETER = ArgumentTags("<parameter=", ">", "", "</parameter>", "\n", frozenset(["string"]))
PAIR = ArgumentTags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def read_tagged_call(
    begin: str, name_end: str, tags: ArgumentTags, end: str, scanner: Scanner, mark: str
) -> Waiting:
    """Read a name between two marks, tagged arguments, and the mark after these. The model may leave out the
    mark around the call; then `begin` is the first one.
    """
    if mark != begin and not (yield from scanner.literal(begin)):
        return False
    name = yield from scanner.name()
    if not name or not (yield from scanner.literal(name_end)):
        return False
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


# --- values -------------------------------------------------------------------------------------------------


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
    return types_of(schema, parameters)


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return frozenset()
    if isinstance(kind := schema.get("type"), str | list):
        return frozenset([kind] if isinstance(kind, str) else [one for one in kind if isinstance(one, str)])
    if isinstance(path := schema.get("$ref"), str):
        return types_of(resolve_reference(path, root), root, depth + 1)
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(JSON_TYPES[type(value)] for value in values if type(value) in JSON_TYPES)
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or ()]
    found = [types_of(part, root, depth + 1) for part in parts]
    return frozenset().union(*found) if all(found) else frozenset()


def resolve_reference(path: str, root: Mapping[str, Any]) -> Any:
    """The schema at a reference `#/…` inside of the parameters."""
    value: Any = root
    for key in path.removeprefix("#").split("/")[1:]:
        value = value.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
    return value


# --- Harmony ------------------------------------------------------------------------------------------------

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER = 512
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
NAME_OF_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
PARAGRAPH = "\n\n"


def read_harmony(scanner: Scanner) -> Scan:
    """Read messages: those to functions are calls, analysis is reasoning, other text is content."""
    said: set[str] = set()
    scanner.begin_mark()
    while (yield from scanner.char()):
        header = yield from read_header(scanner)
        if header is None:
            scanner.reject()
            yield from scanner.content_until(START, CHANNEL)
            scanner.position = 0
            continue
        recipient, channel = found_in(header, RECIPIENT), found_in(header, NAME_OF_CHANNEL)
        if recipient.startswith(FUNCTIONS):
            if not (yield from read_body_of_call(scanner, recipient.removeprefix(FUNCTIONS))):
                scanner.reject()
                yield from read_body(scanner, "content", set())
        elif recipient or channel == "analysis":
            yield from read_body(scanner, "reasoning", said)
        else:
            yield from read_body(scanner, "content", said)
        scanner.begin_mark()


def read_header(scanner: Scanner) -> Generator[None, None, str | None]:
    """What stands before a message's text."""
    yield from scanner.skip()
    if not (yield from scanner.next_is(START, CHANNEL, "to=", "assistant")):
        return None
    return (yield from scanner.until(MESSAGE, MAX_HEADER))


def found_in(header: str, pattern: re.Pattern[str]) -> str:
    """The word that the pattern finds; "" for none."""
    found = pattern.search(header)
    return found[1] if found else ""


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


def read_body_of_call(scanner: Scanner, name: str) -> Waiting:
    yield from scanner.skip()
    found = yield from scanner.next_is(*ENDS)
    if not (add_whole_call(scanner, name, "{}") if found else (yield from read_arguments(scanner, name))):
        return False
    yield from read_ends(scanner, ENDS)
    return True
