"""One choice of an answer on OpenAI's routes, and the pieces in which it is shown."""

from collections.abc import Iterator
from dataclasses import dataclass

from api.inference.stream import Stream
from api.openai.request_schemas import CompletionRequest, OpenAIRequest
from api.openai.stop_text import StopHoldback

FINISH_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What is shown at once.

    Attributes:
        text: without what must wait, with what had to.
        tokens: indices of the tokens that it comes with.
    """

    text: str
    tokens: range


class Choice:
    """A stream and what of it is shown.

    Attributes:
        prefix: text that comes before the answer's own.
        prompt_only: the answer has no text of its own.
        offsets: for each token taken, how many characters of the answer come before it.
        ended: whether all of it was taken.
    """

    def __init__(
        self, index: int, stream: Stream, text: StopHoldback, prefix: str = "", prompt_only: bool = False
    ) -> None:
        self.index, self.stream, self.text, self.prefix, self.prompt_only = (
            index,
            stream,
            text,
            prefix,
            prompt_only,
        )
        self.offsets: list[int] = []
        self.ended = False

    @property
    def started(self) -> bool:
        return self.ended or self.text.num_tokens > 0

    @property
    def failed(self) -> bool:
        return self.stream.terminal is not None and not self.stream.finished

    def take_pieces(self) -> Iterator[TextPiece]:
        """One for each token that can be shown by now; the last one of a finished answer comes with its end."""
        while self.text.num_tokens < self.stream.num_ready and not self.prompt_only:
            yield self.piece(1)
        if self.stream.finished and not self.ended:
            self.ended = True
            yield (
                TextPiece("", range(0))
                if self.prompt_only
                else self.piece(self.stream.num_tokens - self.text.num_tokens)
            )

    def piece(self, num_tokens: int) -> TextPiece:
        begin = self.text.num_tokens
        self.offsets += [len(self.prefix) + self.text.num_chars] * num_tokens
        return TextPiece(
            self.text.last() if self.ended else self.text.step(), range(begin, begin + num_tokens)
        )

    @property
    def render_ending(self) -> dict[str, str | int | None]:
        """How the choice ended; nulls before."""
        reason = FINISH_REASONS[self.stream.terminal.reason] if self.ended and self.stream.terminal else None
        return {"finish_reason": reason, "stop_reason": self.text.stop_reason}


def new_choice(i: int, stream: Stream, body: OpenAIRequest, prefix: str) -> Choice:
    text = StopHoldback(
        stream,
        skip_special=body.skip_special_tokens is not False,
        include_stop=bool(body.include_stop_str_in_output),
    )
    return Choice(i, stream, text, prefix, isinstance(body, CompletionRequest) and body.shows_prompt_only)
