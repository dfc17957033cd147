"""Stop holdback: the text of a choice on OpenAI's routes, without hidden tokens and stop strings.

Text that may become a part of a stop string is held back until that is known.
"""

from collections.abc import Collection, Sequence
from itertools import compress

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
        held: text of the tokens taken that is not free yet.
        shown: whether each character of it is visible.
        stop_reason: the stop string or token id that ended the text, or `insufficient_quota`; set by `last`.
    """

    def __init__(self, stream: Stream, hidden_ids: Collection[int], include_stop: bool) -> None:
        self.stream = stream
        self.hidden_ids = hidden_ids
        self.include_stop = include_stop
        self.held = ""
        self.shown: list[bool] = []
        self.num_tokens = 0
        self.num_chars = 0
        self.stop_reason: str | int | None = None

    def step(self) -> str:
        """Take one token, which is not the last, and return the text that is free now."""
        text, is_shown = self.take_token()
        stopping = self.stream.request.stopping
        if not stopping.stop or self.num_tokens <= stopping.min_new_tokens:
            return text if is_shown else ""
        self.hold(text, is_shown)
        return self.free(end_of_certain(self.held, stopping.stop, 0))

    def last(self) -> str:
        """Take the last token, unless it was taken before, and return the rest of the text."""
        assert self.stream.terminal is not None
        reason, num_held = self.stream.terminal.reason, len(self.held)
        fresh = self.num_tokens < self.stream.num_tokens
        if fresh:
            self.hold(*self.take_token())
        stops = self.stream.request.stopping.stop if reason == "stop_sequence" else []
        stop = find_first_stop(self.held, stops)
        if stop is not None:
            begin, self.stop_reason = stop
            return self.free(begin + self.include_stop * len(self.stop_reason))
        if reason == "stop_sequence":
            self.stop_reason = self.stream.ids[-1]
        if reason == BUDGET:
            self.stop_reason = INSUFFICIENT_QUOTA
        is_end = self.stream.terminal.known_reason != "length" and fresh  # its text is a mark
        return self.free(num_held if is_end and not self.include_stop else len(self.held))

    @property
    def visible_text(self) -> str:
        """The visible text of all tokens."""
        pairs = zip(self.stream.ids, self.stream.texts, strict=False)
        return "".join(text for token, text in pairs if token not in self.hidden_ids)

    def take_token(self) -> tuple[str, bool]:
        """The text of the next token, and whether it is visible."""
        i = self.num_tokens
        text, is_shown = self.stream.texts[i], self.stream.ids[i] not in self.hidden_ids
        self.num_tokens += 1
        self.num_chars += len(text) if is_shown else 0
        return text, is_shown

    def hold(self, text: str, is_shown: bool) -> None:
        self.held += text
        self.shown += [is_shown] * len(text)

    def free(self, end: int) -> str:
        """Remove the held text up to this place; return what of it is visible."""
        text = "".join(compress(self.held[:end], self.shown))
        self.held, self.shown = self.held[end:], self.shown[end:]
        return text


def find_first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The offset of the stop string that is complete first, and that string."""
    found = [(begin + len(stop), begin, stop) for stop in stops if (begin := text.find(stop)) >= 0]
    return min(found)[1:] if found else None
