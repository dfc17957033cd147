"""Response objects of /v1/chat/completions."""

from collections.abc import Iterable, Sequence
from typing import Any

from api.chat.answer import AnswerReader, finish_reason, render_deltas, render_message
from api.inference.stream import Stream
from api.openai.choice import Choice, TextPiece
from api.openai.render import ResponseRenderer, join_text, render_bytes, render_logprob, render_text
from common.messages.answer import HttpAnswer


class ChatCompletionRenderer(ResponseRenderer):
    """Attributes:
    readers: of each choice; none where all text is content.
    """

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        super().__init__(answer, streams)
        reading = answer.rendering.reading
        names = [f"{answer.request_id}.{choice.index}" for choice in self.choices]
        self.readers = [AnswerReader(reading, name) for name in names] if reading else []

    def render_choice(self, choice: Choice, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": join_text(choice, pieces), "refusal": None}
        if self.readers:
            message |= self.read_whole(choice, pieces)
        return {"message": message, "logprobs": self.logprobs(choice.stream, range(choice.stream.num_tokens))}

    def read_whole(self, choice: Choice, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        reader = self.readers[choice.index]
        last = len(pieces) - 1
        deltas = [
            delta
            for i, piece in enumerate(pieces)
            for delta in reader.read(piece.text, len(piece.tokens), i == last)
        ]
        read = reader.join(deltas)
        read.content = choice.prefix + read.content
        return render_message(reader.reading, read)

    def render_first_delta(self, choice: Choice) -> dict[str, Any]:
        content = choice.prefix or (None if self.readers else "")
        return {"delta": {"role": "assistant", "content": content}, "logprobs": None}

    def render_deltas(self, choice: Choice, piece: TextPiece) -> list[dict[str, Any]]:
        logprobs = self.logprobs(choice.stream, piece.tokens)
        if not self.readers:
            return [{"delta": {"content": piece.text}, "logprobs": logprobs}]
        reader = self.readers[choice.index]
        found = render_deltas(reader, reader.read(piece.text, len(piece.tokens), choice.ended))
        if not found and (choice.ended or logprobs is not None):
            found = [{}]
        return [{"delta": delta, "logprobs": None if i else logprobs} for i, delta in enumerate(found)]

    def render_ending(self, choice: Choice) -> dict[str, Any]:
        ending = super().render_ending(choice)
        if self.readers and choice.finish_reason:
            ending["finish_reason"] = finish_reason(self.readers[choice.index], choice.finish_reason)
        return ending

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if any(reader.reading.reasoning or reader.reasons for reader in self.readers):
            num_tokens = sum(reader.num_reasoning_tokens for reader in self.readers)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return usage

    def logprobs(self, stream: Stream, tokens: Iterable[int]) -> dict[str, Any] | None:
        if not self.answer.rendering.logprobs:
            return None
        entries = []
        for i in tokens:
            top_logprobs = [
                render_token_logprob(stream, token_id, logprob)
                for token_id, logprob in (stream.tops[i] if stream.tops else [])
            ]
            entries.append(
                render_token_logprob(stream, stream.ids[i], stream.logprobs[i])
                | {"top_logprobs": top_logprobs}
            )
        return {"content": entries}


def render_token_logprob(stream: Stream, token_id: int, logprob: float) -> dict[str, Any]:
    token = render_bytes(stream, token_id)
    return {"token": render_text(token), "logprob": render_logprob(logprob), "bytes": list(token)}
