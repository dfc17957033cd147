"""Stop holdback: the text of a choice on OpenAI's routes, without hidden tokens and stop strings.

Text that may become a part of a stop string is held back until that is known.
"""

from collections.abc import Collection, Sequence

from api.answers.scanner import end_of_certain
from api.errors import INSUFFICIENT_QUOTA
from api.streams.stream import Stream
from common.messages.events import BUDGET


class StopHoldback:
    """The text of a stream, token by token. All pieces together are the whole text.

    Stop strings are found as the worker's `StopMatcher` finds them: not in the first `min_new_tokens` tokens,
    and special tokens count as their literal text.

    Attributes:
        hidden_ids: tokens that are no part of the text.
        num_tokens: number of tokens taken.
        num_chars: number of characters of the tokens taken, free or held back.
        stop_reason: the stop string or token id that ended the text, or `insufficient_quota`; set by `last`.
    """

    def __init__(self, stream: Stream, hidden_ids: Collection[int], include_stop: bool) -> None:
        self.stream = stream
        self.hidden_ids = hidden_ids
        self.include_stop = include_stop
        self.held: list[tuple[str, str]] = []
        self.num_tokens = 0
        self.num_chars = 0
        self.stop_reason: str | int | None = None

    def step(self) -> str:
        """Take one token, which is not the last, and return the text that is free now."""
        text, visible = self.next_piece()
        stopping = self.stream.request.stopping
        if not stopping.stop or self.num_tokens <= stopping.min_new_tokens:
            return visible
        self.held.append((text, visible))
        held = self.text
        return self.take_text(len(held) - end_of_certain(held, stopping.stop, 0))

    def last(self) -> str:
        """Take the last token, unless it was taken before, and return the rest of the text."""
        assert self.stream.terminal is not None
        reason, fresh = self.stream.terminal.reason, self.num_tokens < self.stream.num_tokens
        if fresh:
            self.held.append(self.next_piece())
        stops = self.stream.request.stopping.stop if reason == "stop_sequence" else []
        stop = find_first_stop(self.text, stops)
        if stop is not None:
            begin, self.stop_reason = stop
            return self.take_text(len(self.text) - begin - self.include_stop * len(self.stop_reason))
        if reason == "stop_sequence":
            self.stop_reason = self.stream.ids[-1]
        if reason == BUDGET:
            self.stop_reason = INSUFFICIENT_QUOTA
        if self.stream.terminal.known_reason != "length" and fresh and not self.include_stop:
            self.held.pop()
        return self.take_text(0)

    # --- pieces: (text, visible text: the same or empty) ----------------------------------------------------

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.held)

    @property
    def visible_text(self) -> str:
        """The visible text of all tokens."""
        pairs = zip(self.stream.ids, self.stream.texts, strict=False)
        return "".join(text for token, text in pairs if token not in self.hidden_ids)

    def next_piece(self) -> tuple[str, str]:
        i = self.num_tokens
        text = self.stream.texts[i]
        visible = "" if self.stream.ids[i] in self.hidden_ids else text
        self.num_tokens += 1
        self.num_chars += len(visible)
        return text, visible

    def take_text(self, num_held: int) -> str:
        """Remove and return the held text, but for its last `num_held` characters."""
        rest = len(self.text) - num_held
        pieces = []
        while self.held and len(self.held[0][0]) <= rest:
            text, visible = self.held.pop(0)
            rest -= len(text)
            pieces.append(visible)
        if rest:
            text, visible = self.held[0]
            self.held[0] = (text[rest:], visible[rest:])
            pieces.append(visible[:rest])
        return "".join(pieces)


def find_first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The offset of the stop string that is complete first, and that string."""
    found = [(begin + len(stop), begin, stop) for stop in stops if (begin := text.find(stop)) >= 0]
    return min(found)[1:] if found else None
