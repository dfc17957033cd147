"""Log-probabilities of generated tokens as chats and responses have them: an object for each token."""

from collections.abc import Iterable
from typing import Any

from api.logprobs.tokens import bytes_of, finite, token_name
from api.streams.stream import Stream


def chat_logprobs(stream: Stream, tokens: Iterable[int], by_id: bool = False) -> list[dict[str, Any]]:
    """Those of the tokens with these indices; `by_id` as in `token_name`."""
    return [
        token_logprob(stream, stream.ids[i], stream.logprobs[i], by_id)
        | {
            "top_logprobs": [
                token_logprob(stream, token_id, logprob, by_id)
                for token_id, logprob in (stream.tops[i] if stream.tops else [])
            ]
        }
        for i in tokens
    ]


def token_logprob(stream: Stream, token_id: int, logprob: float, by_id: bool) -> dict[str, Any]:
    name = token_name(stream, token_id, by_id)
    return {"token": name, "logprob": finite(logprob), "bytes": [*bytes_of(stream, token_id)]}
