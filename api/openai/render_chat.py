"""The objects of /v1/chat/completions."""

from collections.abc import Iterable, Sequence
from typing import Any

from api.inference.stream import Stream
from api.openai.choice import Choice, Piece
from api.openai.render import Answer, readable, spelled, told_logprob
from api.openai.request_schemas import ChatRequest


class ChatAnswer(Answer):
    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, request_id: str, model: str, choices: Sequence[Choice]) -> None:
        super().__init__(body, request_id, model, choices)
        self.shows_logprobs = bool(body.logprobs)

    def told(self, choice: Choice, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self.logprobs(choice.stream, range(choice.stream.num_tokens))}

    def first(self, choice: Choice) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": choice.prefix}, "logprobs": None}

    def added(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return {"delta": {"content": piece.text}, "logprobs": self.logprobs(choice.stream, piece.tokens)}

    def logprobs(self, stream: Stream, tokens: Iterable[int]) -> dict[str, Any] | None:
        if not self.shows_logprobs:
            return None
        entries = []
        for i in tokens:
            tops = [
                entry(stream, token_id, logprob)
                for token_id, logprob in (stream.tops[i] if stream.tops else [])
            ]
            entries.append(entry(stream, stream.ids[i], stream.logprobs[i]) | {"top_logprobs": tops})
        return {"content": entries}


def entry(stream: Stream, token_id: int, logprob: float) -> dict[str, Any]:
    spelling = spelled(stream, token_id)
    return {"token": readable(spelling), "logprob": told_logprob(logprob), "bytes": list(spelling)}
