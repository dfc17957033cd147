"""Response objects of /v1/chat/completions."""

from collections.abc import Iterable
from typing import Any

from api.inference.stream import Stream
from api.openai.choice import Choice, TextPiece
from api.openai.render import ResponseRenderer, render_bytes, render_logprob, render_text


class ChatCompletionRenderer(ResponseRenderer):
    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def render_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self.logprobs(choice.stream, range(choice.stream.num_tokens))}

    def render_first_delta(self, choice: Choice) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": choice.prefix}, "logprobs": None}

    def render_delta(self, choice: Choice, piece: TextPiece) -> dict[str, Any]:
        return {"delta": {"content": piece.text}, "logprobs": self.logprobs(choice.stream, piece.tokens)}

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
