"""The objects of /v1/completions."""

from collections.abc import Sequence
from typing import Any

from api.openai.answer import Answer, readable, spelled, told_logprob
from api.openai.choice import Choice, Piece
from api.openai.schemas import CompletionRequest
from api.stream import Stream


class CompletionAnswer(Answer):
    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, request_id: str, model: str, choices: Sequence[Choice]) -> None:
        super().__init__(body, request_id, model, choices)
        self.shows_logprobs = body.logprobs is not None

    def told(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"text": text, "logprobs": self.logprobs(choice, range(choice.stream.num_tokens))}

    def first(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.prefix, "logprobs": None} if choice.prefix else {}

    def added(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text, "logprobs": self.logprobs(choice, piece.tokens)}

    def logprobs(self, choice: Choice, tokens: Sequence[int]) -> dict[str, Any] | None:
        """Of the older kind: four parallel lists. The token itself is always among the likeliest."""
        if not self.shows_logprobs:
            return None
        stream = choice.stream
        return {
            "tokens": [word(stream, stream.ids[i]) for i in tokens],
            "token_logprobs": [told_logprob(stream.logprobs[i]) for i in tokens],
            "top_logprobs": [likeliest(stream, i) for i in tokens],
            "text_offset": [choice.offsets[i] for i in tokens],
        }


def likeliest(stream: Stream, i: int) -> dict[str, float]:
    own = {word(stream, stream.ids[i]): told_logprob(stream.logprobs[i])}
    tops = stream.tops[i] if stream.tops else []
    return {word(stream, token_id): told_logprob(logprob) for token_id, logprob in tops} | own


def word(stream: Stream, token_id: int) -> str:
    return readable(spelled(stream, token_id))
