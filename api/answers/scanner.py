"""Scanner: an answer's text as it comes, read by generators that wait for more of it. What it says is deltas.

A generator yields where the text so far does not decide what follows. It never looks at where the text so far
ends, so it decides the same for every cut of the text. A JSON value is passed on as it is read.
"""

import json
import re
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

SPACE = " \t\r\n"
MAX_NAME = 256
MAX_KEPT = 4096
"""Characters of a call that are kept after they were read."""
NO_NAME = "<>[]{}()\"'`,;="
"""Characters that no function's name has, and no number."""
Scan = Generator[None, None, None]
"""A reader of text. It yields while it waits for more."""
Waiting = Generator[None, None, bool]
"""The same; it returns whether the text was what it reads."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: the JSON schema of its arguments, an object's.
        strict: its calls are forced to match the schema.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = ContentDelta | ReasoningDelta | CallStart | CallArguments


class Scanner:
    """The text about which nothing is decided yet, and the deltas of what is decided.

    White space before and after calls and reasoning is dropped.

    Attributes:
        tools: the functions that the request offers.
        text: from the last mark on; it is content if no call follows.
        position: how much of it is read.
        content_to: where the mark ends; up to here, text is content if no call follows.
        ended: no text follows.
        space: white space that is content if more content follows.
        trims: white space that follows is dropped.
        names: functions whose calls are read; None for any.
        num_calls: calls that have begun.
        committed: a call has begun since the last mark.
        is_either: an answer that does not begin with a call has none.
    """

    def __init__(self, tools: Sequence[Tool] = (), is_either: bool = False) -> None:
        self.tools = tools
        self.is_either = is_either
        self.names: Container[str] | None = None
        self.text = ""
        self.position = 0
        self.content_to = 0
        self.ended = False
        self.space = ""
        self.trims = False
        self.num_calls = 0
        self.committed = False
        self.deltas: list[Delta] = []

    # --- reading --------------------------------------------------------------------------------------------

    def next_is(self, *words: str) -> Waiting:
        """Whether one of the words follows."""
        longest = max(map(len, words))
        while True:
            rest = self.text[self.position : self.position + longest]
            if rest.startswith(words):
                return True
            if self.ended or not any(word.startswith(rest) for word in words):
                return False
            yield

    def literal(self, word: str) -> Waiting:
        """Read a word, if it follows."""
        found = yield from self.next_is(word)
        if found:
            self.position += len(word)
        return found

    def peek(self, size: int) -> Generator[None, None, str]:
        """The next characters, which are not read; fewer at the end."""
        while len(self.text) < self.position + size and not self.ended:
            yield
        return self.text[self.position : self.position + size]

    def char(self) -> Generator[None, None, str]:
        """The next character, which is not read; "" at the end."""
        return self.peek(1)

    def skip(self, chars: str = SPACE) -> Scan:
        """Read over all of these characters that follow."""
        while (char := (yield from self.char())) and char in chars:
            self.position += 1

    def until(self, mark: str, most: int) -> Generator[None, None, str | None]:
        """Read up to a mark, and over it. None, with nothing read, if it does not follow within `most`
        characters.
        """
        while (found := find_mark(self.text, [mark], self.position, self.ended)) is None:
            if len(self.text) - self.position > most + len(mark):
                return None
            yield
        end, mark = found
        if not mark or end - self.position > most:
            return None
        text = self.text[self.position : end]
        self.position = end + len(mark)
        return text

    def pass_until(self, write: Callable[[str], None], *marks: str) -> Generator[None, None, str]:
        """Pass on all text up to one of the marks, as it comes, and forget it. The mark is read over; ""
        at the end.
        """
        while (found := find_mark(self.text, marks, self.position, self.ended)) is None:
            self.pass_on(write, end_of_certain(self.text, marks, self.position))
            yield
        end, mark = found
        self.pass_on(write, end)
        self.position = len(mark)
        return mark

    def pass_on(self, write: Callable[[str], None], end: int) -> None:
        text = self.text[self.position : end]
        self.forget(end)
        write(text)

    def take(self, text: str, write: Callable[[str], None]) -> None:
        """Read the text that follows, and pass it on."""
        self.position += len(text)
        write(text)

    def name(self, end: str = "") -> Generator[None, None, str]:
        """Read a name or another word: characters that are neither space nor brackets, quotes, commas, `end`;
        "" if there are more than MAX_NAME.
        """
        start = self.position
        while (char := (yield from self.char())) and not char.isspace() and char not in NO_NAME + end:
            self.position += 1
            if self.position - start > MAX_NAME:
                return ""
        return self.text[start : self.position]

    # --- content --------------------------------------------------------------------------------------------

    def content_until(self, *marks: str) -> Generator[None, None, str]:
        """All text up to one of the marks is content. The mark is read over; "" at the end of the text."""
        mark = yield from self.pass_until(self.add_content, *marks)
        self.position = 0
        self.begin_mark(mark)
        return mark

    def begin_mark(self, mark: str = "") -> None:
        """What follows, beginning with this mark, may be a call."""
        self.forget(self.position)
        self.position = len(mark)
        self.content_to = max(1, len(mark))
        self.committed = False

    def reject(self) -> None:
        """What follows the last mark is no call: the mark is content, unless a call has begun since."""
        if self.committed:
            return
        self.add_content(self.text[: self.content_to])
        self.forget(self.content_to)

    def forget(self, end: int) -> None:
        self.text = self.text[end:]
        self.position = 0

    # --- deltas ---------------------------------------------------------------------------------------------

    def add_content(self, text: str) -> None:
        if text := self.trimmed(text):
            self.emit(ContentDelta(text))

    def add_reasoning(self, text: str) -> None:
        if text := self.trimmed(text):
            self.emit(ReasoningDelta(text))

    def trimmed(self, text: str) -> str:
        """The text without white space at its end, which waits for what follows."""
        text = text.lstrip(SPACE) if self.trims else self.space + text
        kept = text.rstrip(SPACE)
        self.space = text[len(kept) :]
        self.trims = self.trims and not kept
        return kept

    def trim(self) -> None:
        """Drop the white space before and after this place."""
        self.space = ""
        self.trims = True

    def start_call(self, name: str) -> None:
        self.trim()
        self.committed = True
        self.emit(CallStart(self.num_calls, name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """The next piece of the arguments of the call that began last."""
        if text:
            self.emit(CallArguments(self.num_calls - 1, text))
        if self.position > MAX_KEPT:
            self.forget(self.position)

    def emit(self, delta: Delta) -> None:
        """Add a delta to those of this piece of text, joined with the last one where it continues it."""
        match [*self.deltas[-1:], delta]:
            case [ContentDelta(before), ContentDelta(text)]:
                self.deltas[-1] = ContentDelta(before + text)
            case [ReasoningDelta(before), ReasoningDelta(text)]:
                self.deltas[-1] = ReasoningDelta(before + text)
            case [CallArguments(index, before), CallArguments(_, text)]:
                self.deltas[-1] = CallArguments(index, before + text)
            case _:
                self.deltas.append(delta)


def find_mark(text: str, marks: Sequence[str], start: int, ended: bool) -> tuple[int, str] | None:
    """The place of the first mark in the text, and the mark: the longest of those that begin there. Without a
    mark in a whole text, its end and "". None while a mark may have begun before that place, or may follow.
    """
    found = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark, start)) >= 0]
    place, _, mark = min(found, default=(len(text), 0, ""))
    return (place, mark) if ended or place < end_of_certain(text, marks, start) else None


def end_of_certain(text: str, marks: Sequence[str], start: int) -> int:
    """The end of the text that cannot be the beginning of a mark."""
    longest = max((len(mark) for mark in marks), default=1)
    for place in range(max(start, len(text) - longest + 1), len(text)):
        rest = text[place:]
        if any(len(mark) > len(rest) and mark.startswith(rest) for mark in marks):
            return place
    return len(text)


PLAIN = re.compile(r"[^\"'\\\x00-\x1f]+")
Write = Callable[[str], None]


class Syntax(NamedTuple):
    """How values are written; `word` is a value that is neither a string nor between brackets."""

    quotes: str
    opening: str
    closing: str
    word: re.Pattern[str]


JSON = Syntax('"', "{[", "}]", re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?"))
PYTHON = Syntax("\"'", "{[(", "}])", re.compile(".+"))


def read_value(scanner: Scanner, write: Write, syntax: Syntax = JSON) -> Waiting:
    """Read a value. False where the text is none, with all before that place read; but brackets need not be
    of one kind, nor need objects have keys.
    """
    depth, may_begin = 0, True  # a value, since none has come after the last bracket or comma
    while char := (yield from scanner.char()):
        if depth and (char in SPACE or char in syntax.closing or (char in ",:" and not may_begin)):
            depth -= char in syntax.closing
            may_begin = char in ",:" or (char in SPACE and may_begin)
            scanner.take(char, write)
        elif not may_begin:
            return False
        elif char in syntax.opening:
            depth += 1
            scanner.take(char, write)
        elif char in syntax.quotes:
            may_begin = False
            if not (yield from read_string(scanner, write)):
                return False
        else:
            may_begin = False
            start = scanner.position
            word = yield from scanner.name(":")
            if syntax.word.fullmatch(word) is None:
                scanner.position = start
                return False
            write(word)
        if not depth:
            return True
    return False


def read_string(scanner: Scanner, write: Write) -> Waiting:
    """Read a string. Control characters, for which models forget the escapes, are written as these."""
    quote = yield from scanner.char()
    scanner.take(quote, write)
    while char := (yield from scanner.char()):
        if found := PLAIN.match(scanner.text, scanner.position):
            scanner.take(found[0], write)
        elif char == "\\":
            scanner.take((yield from scanner.peek(2)), write)
        elif char < " ":
            scanner.position += 1
            write(json.dumps(char)[1:-1])
        else:
            scanner.take(char, write)
            if char == quote:
                return True
    return False


def is_json_text(text: str) -> bool:
    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


def refuse(constant: str) -> None:
    """NaN and Infinity are no JSON."""
    raise ValueError(constant)
