"""Calls whose arguments are one JSON object: after a mark, in lists, on lines of their own, or in sections.

The reader of each format passes arguments on as they come. Its constants are its marks.
"""

import json
from collections.abc import Callable, Container, Generator, Sequence
from typing import NamedTuple

from api.answers.json_text import read_members, read_object, read_string, read_value
from api.answers.scanner import MAX_NAME, SPACE, Scan, Scanner, Waiting

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


def read_marked(
    marks: Sequence[str], read_one: Callable[[Scanner, str], Waiting], close: str, scanner: Scanner
) -> Scan:
    """Read calls after one of the marks; `read_one` gets the mark. Models may forget the one that closes."""
    while mark := (yield from scanner.content_until(*marks)):
        yield from scanner.skip()
        if not (yield from read_one(scanner, mark)):
            scanner.reject()
        elif close:
            yield from scanner.skip()
            yield from scanner.literal(close)


def read_calls(scanner: Scanner, mark: str = "") -> Waiting:
    """Read a call, or a list of them."""
    if (yield from scanner.char()) == "[":
        return (yield from read_call_list(scanner, lambda: read_call(scanner)))
    return (yield from read_call(scanner))


# --- Llama 3 ------------------------------------------------------------------------------------------------

PYTHON_TAG = "<|python_tag|>"
OBJECT_LINE = "\n{"


def read_llama_json(scanner: Scanner) -> Scan:
    """Read objects without marks around them, or after one. An object is a call only if it begins a line and
    names a function that the request offers.
    """
    names = {tool.name for tool in scanner.tools}
    scanner.begin_mark()
    yield from scanner.skip()
    yield from scanner.literal(PYTHON_TAG)
    while True:
        yield from scanner.skip(SPACE + ";")
        if (yield from read_call(scanner, names)):
            scanner.begin_mark()
            continue
        scanner.reject()
        if not (yield from next_call(scanner, PYTHON_TAG, OBJECT_LINE)):
            return


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
FENCE = "```"
"""DeepSeek V3 and R1 write the type `function` before the mark, and the name and a fence after it."""


def read_section(marks: SectionMarks, scanner: Scanner, mark: str) -> Waiting:
    """Read a call, with marks at both ends, and between name and arguments."""
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
    if not name or not (yield from read_arguments(scanner, bare_name(name))):
        return False
    yield from scanner.skip()
    if (yield from scanner.literal(FENCE)):
        yield from scanner.skip()
    yield from scanner.literal(marks.call_end)
    yield from scanner.skip()
    yield from scanner.literal(marks.calls_end)
    return True


def bare_name(name: str) -> str:
    """A name without Kimi's `functions.` before it and the call's number after it."""
    if name.startswith("functions."):
        return name.removeprefix("functions.").split(":")[0]
    return name


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
