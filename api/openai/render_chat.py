"""Response objects of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from api.chat.answer import ChoiceParser, finish_reason, render_deltas, render_message
from api.logprobs.render import chat_logprobs
from api.openai.choice import Choice, TextPiece
from api.openai.render import ChoicesRenderer, join_text
from api.streams.stream import Stream
from common.messages.answer import HttpAnswer


class ChatCompletionRenderer(ChoicesRenderer):
    """Renders chat completions and their chunks.

    Attributes:
        parsers: of each choice; none where all text is content.
    """

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        super().__init__(answer, streams)
        reading = answer.rendering.reading
        names = [f"{answer.request_id}.{choice.index}" for choice in self.choices]
        self.parsers = [ChoiceParser(reading, name) for name in names] if reading else []

    def render_choice(self, choice: Choice, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": join_text(choice, pieces), "refusal": None}
        if self.parsers:
            message |= self.read_whole(choice, pieces)
        tokens = range(choice.stream.num_tokens)
        ids = self.token_ids(choice.stream, tokens)
        return {"message": message, "logprobs": self.logprobs(choice.stream, tokens), **ids}

    def whole_fields(self) -> dict[str, Any]:
        return self.prompt_ids(self.choices[0]) | self.prompt_logprobs(self.choices[0])

    def first_fields(self, choice: Choice) -> dict[str, Any]:
        return self.prompt_ids(choice)

    def read_whole(self, choice: Choice, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        parser = self.parsers[choice.index]
        last = len(pieces) - 1
        deltas = [
            delta
            for i, piece in enumerate(pieces)
            for delta in parser.read(piece.text, len(piece.tokens), i == last)
        ]
        return render_message(parser, deltas, choice.prefix)

    def render_first_delta(self, choice: Choice) -> dict[str, Any]:
        content = choice.prefix or (None if self.parsers else "")
        return {"delta": {"role": "assistant", "content": content}, "logprobs": None}

    def render_deltas(self, choice: Choice, piece: TextPiece) -> list[dict[str, Any]]:
        stream = choice.stream
        logprobs, ids = self.logprobs(stream, piece.tokens), self.token_ids(stream, piece.tokens)
        if not self.parsers:
            return [{"delta": {"content": piece.text}, "logprobs": logprobs, **ids}]
        parser = self.parsers[choice.index]
        found = render_deltas(parser, parser.read(piece.text, len(piece.tokens), choice.ended))
        if not found and (choice.ended or logprobs is not None or ids):
            found = [{}]
        later = self.token_ids(stream, range(0))
        return [
            {"delta": delta, "logprobs": None if i else logprobs, **(later if i else ids)}
            for i, delta in enumerate(found)
        ]

    def render_ending(self, choice: Choice) -> dict[str, Any]:
        ending = super().render_ending(choice)
        if self.parsers and choice.finish_reason:
            ending["finish_reason"] = finish_reason(self.parsers[choice.index], choice.finish_reason)
        return ending

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if any(parser.reading.reasoning or parser.reasons for parser in self.parsers):
            num_tokens = sum(parser.num_reasoning_tokens for parser in self.parsers)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return usage

    def logprobs(self, stream: Stream, tokens: range) -> dict[str, Any] | None:
        shows = self.answer.rendering
        return {"content": chat_logprobs(stream, tokens, shows.names_by_id)} if shows.logprobs else None
