"""One choice of a response on OpenAI's routes, and the pieces of text that are sent of it."""

from collections.abc import Sequence
from typing import NamedTuple

from api.answers.chat_answer import ChoiceParser, is_whole_json, marks_of, render_message
from api.answers.stop_holdback import StopHoldback
from api.streams.stream import Stream
from common.messages.answer import HttpAnswer, Rendering

FINISH_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


class TextPiece(NamedTuple):
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
        rendering: how it is rendered.
        offsets: for each token taken, the number of characters before it.
        begun: whether the choice was shown: by a chunk before its first piece, or by that piece.
        ended: whether everything was taken.
    """

    def __init__(
        self, index: int, stream: Stream, text: StopHoldback, prefix: str, rendering: Rendering
    ) -> None:
        self.index = index
        self.stream = stream
        self.text = text
        self.prefix = prefix
        self.rendering = rendering
        self.offsets: list[int] = []
        self.begun = False
        self.ended = False

    @property
    def failed(self) -> bool:
        return self.stream.terminal is not None and not self.stream.finished

    @property
    def has_tokens(self) -> bool:
        """Whether a token can be sent now that is not the last one of a finished choice."""
        return self.text.num_tokens < self.stream.num_ready and not self.rendering.prompt_only

    @property
    def has_piece(self) -> bool:
        return self.has_tokens or (self.stream.finished and not self.ended)

    def take_piece(self) -> TextPiece:
        """The next piece of a choice that has one: a token's. The last piece of a finished choice ends it."""
        self.begun = True
        if self.stream.terminal is None or self.has_tokens:
            return self.piece(1)
        self.ended = True
        if self.rendering.prompt_only:
            return TextPiece("", range(0))
        return self.piece(self.stream.num_tokens - self.text.num_tokens)

    def piece(self, num_tokens: int) -> TextPiece:
        begin = self.text.num_tokens
        self.offsets += [len(self.prefix) + self.text.num_chars] * num_tokens
        return TextPiece(
            self.text.last() if self.ended else self.text.step(), range(begin, begin + num_tokens)
        )

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word for the end of the text; None until it ends. From a JSON that is whole `max_tokens`
        takes nothing.
        """
        if not self.ended or self.stream.terminal is None:
            return None
        reason = FINISH_REASONS[self.stream.terminal.reason]
        return "stop" if reason == "length" and self.is_whole_json else reason

    @property
    def is_whole_json(self) -> bool:
        """Whether the client asked for JSON, and the content so far is all of one."""
        if not self.rendering.is_json:
            return False
        content, reading = self.text.visible_text, self.rendering.reading
        if reading is not None:
            parser = ChoiceParser(reading, "")
            content = render_message(parser, parser.read(content, 0, ended=True))["content"] or ""
        return is_whole_json(content)


def new_choices(answer: HttpAnswer, streams: Sequence[Stream]) -> list[Choice]:
    rendering = answer.rendering
    return [
        Choice(
            i,
            stream,
            StopHoldback(stream, hidden_ids(answer, stream), rendering.include_stop),
            answer.prefix(i),
            rendering,
        )
        for i, stream in enumerate(streams)
    ]


def hidden_ids(answer: HttpAnswer, stream: Stream) -> frozenset[int]:
    """Special tokens that are no part of the text: all but those that divide it into reasoning and calls."""
    if not answer.rendering.skip_special:
        return frozenset()
    marks = marks_of(answer.rendering.reading) if answer.rendering.reading else ()
    shown = {stream.tokenizer.backend.token_to_id(mark) for mark in marks}
    return stream.tokenizer.special_ids - shown
