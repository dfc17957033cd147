"""Tokens as OpenAI's log-probabilities name them, and numbers that JSON can carry."""

from api.inference.token_bytes import token_bytes
from api.streams.stream import Stream

LEAST_LOGPROB = -9999.0
"""OpenAI's value for an impossible token, because JSON has no minus infinity."""


def bytes_of(stream: Stream, token_id: int) -> bytes:
    """The bytes of a token."""
    return token_bytes(stream.tokenizer.backend, token_id)


def token_name(stream: Stream, token_id: int, by_id: bool = False) -> str:
    """A token's text; with `by_id` its id, as vLLM writes it for tokens whose bytes are no text."""
    return f"token_id:{token_id}" if by_id else bytes_of(stream, token_id).decode(errors="replace")


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
