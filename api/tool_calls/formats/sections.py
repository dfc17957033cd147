"""Calls in sections with marks at both ends, and between name and arguments: DeepSeek's and Kimi's."""

from typing import NamedTuple

from api.tool_calls.reading.call_object import read_arguments
from api.tool_calls.reading.scanner import MAX_NAME, Scan, Scanner, Waiting


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


def read_sections(marks: SectionMarks, scanner: Scanner) -> Scan:
    while mark := (yield from scanner.content_until(marks.calls_begin, marks.call_begin)):
        yield from scanner.skip()
        has_begun = mark == marks.call_begin or (yield from scanner.literal(marks.call_begin))
        if not has_begun or not (yield from read_section(marks, scanner)):
            scanner.reject()


def read_section(marks: SectionMarks, scanner: Scanner) -> Waiting:
    """Read the call that follows the mark of its beginning."""
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
    if not name or not (yield from read_arguments(scanner, bare(name))):
        return False
    yield from scanner.skip()
    if (yield from scanner.literal(FENCE)):
        yield from scanner.skip()
    yield from scanner.literal(marks.call_end)
    yield from scanner.skip()
    yield from scanner.literal(marks.calls_end)
    return True


def bare(name: str) -> str:
    """A name without Kimi's `functions.` before it and the call's number after it."""
    if name.startswith("functions."):
        return name.removeprefix("functions.").split(":")[0]
    return name
