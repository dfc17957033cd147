"""Choice: one of the answers to a request on OpenAI's routes, and the pieces of text in which it is sent."""

from collections.abc import Sequence
from typing import NamedTuple

from api.answers.answer import HttpAnswer, Rendering
from api.answers.chat_answer import ChoiceParser, is_whole_json, marks_of, render_message
from api.answers.scanner import ContentDelta, Delta
from api.answers.stop_holdback import StopHoldback
from api.streams.beams import all_outputs, is_absent
from api.streams.stream import Stream

FINISH_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


class TextPiece(NamedTuple):
    """A piece of a choice's text, sent in one chunk.

    Attributes:
        text: new text that may be shown; text that may become a stop string waits for a later piece.
        tokens: indices of the tokens that the chunk reports.
    """

    text: str
    tokens: range


class Choice:
    """A choice: a stream, and how much of it was taken.

    Attributes:
        text: the stream's text; text that may become a stop string is held back.
        prefix: text that is sent before the generated text (`echo`).
        offsets: for each token taken, the number of characters before it.
        begun: whether the first piece, or a chunk before it, was taken.
        ended: whether everything was taken.
        is_absent: whether it does not exist (api/streams/beams.py).
    """

    is_absent = False

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
        """Whether a token can be taken now; the last one of a finished choice is taken with its end."""
        return self.text.num_tokens < self.stream.num_ready and not self.rendering.prompt_only

    @property
    def has_piece(self) -> bool:
        return self.has_tokens or (self.stream.finished and not self.ended)

    def take_piece(self) -> TextPiece:
        """The next piece of a choice that has one: one token, or the end of a finished choice."""
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
        """OpenAI's word for the end of the text; None until it ends. A complete JSON ends with `stop`, even
        at `max_tokens`.
        """
        if not self.ended or self.stream.terminal is None:
            return None
        reason = FINISH_REASONS[self.stream.terminal.known_reason]
        return "stop" if reason == "length" and self.is_whole_json else reason

    @property
    def is_whole_json(self) -> bool:
        """Whether the client asked for JSON, and the content so far is a complete one."""
        if not self.rendering.is_json:
            return False
        content, reading = self.text.visible_text, self.rendering.reading
        if reading is not None:
            parser = ChoiceParser(reading, "")
            content = render_message(parser, parser.read(content, 0, ended=True))["content"] or ""
        return is_whole_json(content)


class SequenceChoice(Choice):
    """A sequence of a beam search: its whole text is one piece."""

    @property
    def is_absent(self) -> bool:  # type: ignore[override]
        return is_absent(self.stream)

    @property
    def has_piece(self) -> bool:
        return self.stream.finished and not self.ended

    def take_piece(self) -> TextPiece:
        pieces = []
        while not self.ended:
            pieces.append(super().take_piece())
        return TextPiece("".join(piece.text for piece in pieces), range(self.stream.num_tokens))


def new_parser(answer: HttpAnswer, index: int = 0) -> ChoiceParser | None:
    """What finds reasoning and calls in the text of a choice; None if all of it is content."""
    reading = answer.rendering.reading
    return ChoiceParser(reading, f"{answer.request_id}.{index}") if reading else None


def read_piece(parser: ChoiceParser | None, piece: TextPiece, ended: bool) -> list[Delta]:
    """The deltas of a piece: none for a token that shows no text of its own. `ended`: it is the last one."""
    if parser is not None:
        return parser.read(piece.text, len(piece.tokens), ended)
    return [ContentDelta(piece.text)] if piece.text else []


def new_choices(answer: HttpAnswer, streams: Sequence[Stream]) -> list[Choice]:
    """The choices of an answer, in order.

    Args:
        streams: of its requests.
    """
    rendering = answer.rendering
    return [
        (SequenceChoice if stream.request.beams else Choice)(
            i,
            stream,
            StopHoldback(stream, hidden_ids(answer, stream), rendering.include_stop),
            answer.prefix(i),
            rendering,
        )
        for i, stream in enumerate(all_outputs(streams))
    ]


def hidden_ids(answer: HttpAnswer, stream: Stream) -> frozenset[int]:
    """Special tokens that the text leaves out: all but those that mark reasoning and calls in it."""
    if not answer.rendering.skip_special:
        return frozenset()
    marks = marks_of(answer.rendering.reading) if answer.rendering.reading else ()
    shown = {stream.tokenizer.backend.token_to_id(mark) for mark in marks}
    return stream.tokenizer.special_ids - shown
