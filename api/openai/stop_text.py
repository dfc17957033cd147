"""The text of an answer as OpenAI's clients see it: no special tokens, no stop string, and nothing early that
may become part of one.
"""

from collections.abc import Sequence

from api.inference.stream import Stream


class StopHoldback:
    """Gives out the text of a stream token by token; all of it together is the whole answer.

    Where stop strings may begin is as in `StopMatcher`: not before the first `min_new_tokens` tokens, and
    special tokens count as their literal text.

    Attributes:
        num_tokens: tokens taken.
        num_chars: characters of the tokens taken, shown or held back.
        stop_reason: the stop string, or the id, that ended the answer; after `last`.
    """

    def __init__(self, stream: Stream, skip_special: bool, include_stop: bool) -> None:
        self.stream, self.skip_special, self.include_stop = stream, skip_special, include_stop
        self.held: list[tuple[str, str]] = []
        self.num_tokens = self.num_chars = 0
        self.stop_reason: str | int | None = None

    def step(self) -> str:
        """What can be shown after one more token, which is not the last."""
        text, visible = self.take()
        stopping = self.stream.request.stopping
        if not stopping.stop or self.num_tokens <= stopping.min_new_tokens:
            return visible
        self.held.append((text, visible))
        return self.release(num_chars_held(self.text, stopping.stop))

    def last(self) -> str:
        """What the last token adds to all that was held back. If that token was taken before, the rest is all
        there is.
        """
        assert self.stream.terminal is not None
        reason, fresh = self.stream.terminal.reason, self.num_tokens < self.stream.num_tokens
        if fresh:
            self.held.append(self.take())
        stops = self.stream.request.stopping.stop if reason == "stop_sequence" else []
        stop = find_first_stop(self.text, stops)
        if stop is not None:
            begin, self.stop_reason = stop
            return self.release(len(self.text) - begin - self.include_stop * len(self.stop_reason))
        if reason == "stop_sequence":
            self.stop_reason = self.stream.ids[-1]
        if reason != "length" and fresh and not self.include_stop:
            self.held.pop()
        return self.release(0)

    # --- pieces: (text, what is shown of it: all or nothing) ------------------------------------------------

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.held)

    def take(self) -> tuple[str, str]:
        i = self.num_tokens
        text = self.stream.texts[i]
        hidden = self.skip_special and self.stream.ids[i] in self.stream.tokenizer.special_ids
        visible = "" if hidden else text
        self.num_tokens += 1
        self.num_chars += len(visible)
        return text, visible

    def release(self, num_held: int) -> str:
        """All but the last `num_held` characters."""
        rest = len(self.text) - num_held
        shown = []
        while self.held and len(self.held[0][0]) <= rest:
            text, visible = self.held.pop(0)
            rest -= len(text)
            shown.append(visible)
        if rest:
            text, visible = self.held[0]
            self.held[0] = (text[rest:], visible[rest:])
            shown.append(visible[:rest])
        return "".join(shown)


def num_chars_held(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of a text with which a stop string begins."""
    lengths = range(min(len(text), max(map(len, stops), default=1) - 1), 0, -1)
    return next((length for length in lengths if any(stop.startswith(text[-length:]) for stop in stops)), 0)


def find_first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string begins that is complete first, and which it is."""
    found = [(begin + len(stop), begin, stop) for stop in stops if (begin := text.find(stop)) >= 0]
    return min(found)[1:] if found else None
