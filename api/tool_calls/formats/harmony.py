"""Harmony, in which gpt-oss writes all: messages on channels, with a recipient where they are calls."""

import re
from collections.abc import Generator

from api.tool_calls.reading.call_object import add_whole_call, read_arguments
from api.tool_calls.reading.scanner import Reader, Reading, Waiting

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER = 512
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
NAME_OF_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
FUNCTIONS = "functions."
PARAGRAPH = "\n\n"


def read_harmony(reader: Reader) -> Reading:
    """Read messages: analysis is reasoning, calls are those to functions, other text is content."""
    said: set[str] = set()
    reader.begin_mark()
    while (yield from reader.char()):
        header = yield from read_header(reader)
        if header is None:
            reader.reject()
            yield from reader.content_until(START, CHANNEL)
            reader.position = 0
            continue
        recipient, channel = found_in(header, RECIPIENT), found_in(header, NAME_OF_CHANNEL)
        if recipient.startswith(FUNCTIONS):
            if not (yield from read_body_of_call(reader, recipient.removeprefix(FUNCTIONS))):
                reader.reject()
                yield from read_body(reader, "content", set())
        elif recipient or channel == "analysis":
            yield from read_body(reader, "reasoning", said)
        else:
            yield from read_body(reader, "content", said)
        reader.begin_mark()


def read_header(reader: Reader) -> Generator[None, None, str | None]:
    """What stands before a message's text."""
    yield from reader.skip()
    if not (yield from reader.next_is(START, CHANNEL, "to=", "assistant")):
        return None
    return (yield from reader.until(MESSAGE, MAX_HEADER))


def found_in(header: str, pattern: re.Pattern[str]) -> str:
    """The word that the pattern finds; "" for none."""
    found = pattern.search(header)
    return found[1] if found else ""


def read_body(reader: Reader, kind: str, said: set[str]) -> Reading:
    """Read a message's text; a blank line is between it and the last of its kind."""
    reader.trim()
    if kind in said:
        reader.space = PARAGRAPH
        reader.trims = False
    write = reader.add_reasoning if kind == "reasoning" else reader.add_content
    mark = yield from reader.pass_until(write, *ENDS, START, CHANNEL)
    if not reader.trims:
        said.add(kind)
    reader.trim()
    if mark not in ENDS:
        reader.position -= len(mark)


def read_body_of_call(reader: Reader, name: str) -> Waiting:
    yield from reader.skip()
    found = yield from reader.next_is(*ENDS)
    if not (add_whole_call(reader, name, "{}") if found else (yield from read_arguments(reader, name))):
        return False
    yield from reader.skip()
    for end in ENDS:
        yield from reader.literal(end)
    return True
