"""One choice of a response on OpenAI's routes, and the pieces of text that are sent of it."""

from collections.abc import Iterator
from dataclasses import dataclass

from api.inference.stream import Stream
from api.openai.request_schemas import CompletionRequest, OpenAIRequest
from api.openai.stop_holdback import StopHoldback

FINISH_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of a choice's text, sent in one chunk.

    Attributes:
        text: new text, without what is held back, with what was held back before and is free now.
        tokens: indices of the tokens that the chunk reports.
    """

    text: str
    tokens: range


class Choice:
    """A choice: a stream, and how much of it was sent.

    Attributes:
        text: the stream's text, where text that may become a stop string is held back.
        prefix: text that is sent before the generated text (`echo`).
        prompt_only: the choice has no generated text.
        offsets: for each token taken, the number of characters before it.
        ended: whether everything was taken.
    """

    def __init__(
        self, index: int, stream: Stream, text: StopHoldback, prefix: str = "", prompt_only: bool = False
    ) -> None:
        self.index = index
        self.stream = stream
        self.text = text
        self.prefix = prefix
        self.prompt_only = prompt_only
        self.offsets: list[int] = []
        self.ended = False

    @property
    def started(self) -> bool:
        return self.ended or self.text.num_tokens > 0

    @property
    def failed(self) -> bool:
        return self.stream.terminal is not None and not self.stream.finished

    def take_pieces(self) -> Iterator[TextPiece]:
        """Yields a piece for each token that can be sent now. The last piece of a finished choice ends it."""
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
        """The fields `finish_reason` and `stop_reason`; null until the choice ends."""
        reason = FINISH_REASONS[self.stream.terminal.reason] if self.ended and self.stream.terminal else None
        return {"finish_reason": reason, "stop_reason": self.text.stop_reason}


def new_choice(i: int, stream: Stream, body: OpenAIRequest, prefix: str) -> Choice:
    text = StopHoldback(
        stream,
        skip_special=body.skip_special_tokens is not False,
        include_stop=bool(body.include_stop_str_in_output),
    )
    return Choice(i, stream, text, prefix, isinstance(body, CompletionRequest) and body.shows_prompt_only)
