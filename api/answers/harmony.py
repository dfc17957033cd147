"""Harmony, gpt-oss's format: messages on channels; a message that is a call has a recipient."""

import re
from collections.abc import Generator

from api.answers.json_calls import add_whole_call, read_arguments
from api.answers.scanner import Scan, Scanner, Waiting

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
    yield from scanner.skip()
    for end in ENDS:
        yield from scanner.literal(end)
    return True
