"""Answer parser: the deltas of one answer's text, as it comes.

The deltas are a pure function of the pieces of text, and joined they are the same for every cut of it.
"""

from collections.abc import Sequence

from api.tool_calls.formats.table import CallFormat
from api.tool_calls.reading.deltas import ContentDelta, Delta, Tool
from api.tool_calls.reading.scanner import Scan, Scanner, Waiting
from api.tool_calls.reasoning import ReasoningFormat, read_reasoning


class AnswerParser:
    """Reads one answer: reasoning first, where the model thinks, then content and calls.

    Attributes:
        tools: the functions that the request offers.
        calls: how the model writes calls; None if all is content.
        reasoning: how the model thinks; None if it does not.
        prompt: the end of the prompt, in which thinking may have begun.
        is_either: an answer that does not begin with a call has none.
    """

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        calls: CallFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        prompt: str = "",
        is_either: bool = False,
    ) -> None:
        self.scanner = Scanner(tools, is_either)
        self.reading = read_answer(self.scanner, calls, reasoning, prompt)
        next(self.reading, None)

    def feed(self, text: str) -> list[Delta]:
        """What the next piece of text says. Marks of the formats are part of it, special tokens or not."""
        self.scanner.text += text
        next(self.reading, None)
        deltas, self.scanner.deltas = self.scanner.deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """What the rest of the text says, when none follows."""
        self.scanner.ended = True
        return self.feed("")

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun."""
        return self.scanner.num_calls


def read_answer(
    scanner: Scanner, calls: CallFormat | None, reasoning: ReasoningFormat | None, prompt: str
) -> Scan:
    yield
    if reasoning is not None:
        yield from read_reasoning(scanner, reasoning, reasoning.begins_inside(prompt))
    if calls is not None and (not scanner.is_either or (yield from begins_call(scanner, calls))):
        yield from calls.read(scanner)
    else:
        yield from scanner.content_until()
    if scanner.space:  # white space at the end is content
        scanner.emit(ContentDelta(scanner.space))


def begins_call(scanner: Scanner, calls: CallFormat) -> Waiting:
    """Whether a call may follow at once; nothing is read."""
    start = scanner.position
    yield from scanner.skip()
    found = yield from scanner.next_is(*calls.marks, *calls.unmarked)
    scanner.position = start
    return found
