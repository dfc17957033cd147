"""Log-probabilities in response bodies, described for /docs."""

from api.http.openapi import ApiObject


class TopLogprob(ApiObject):
    token: str
    logprob: float | None
    bytes: list[int]
    """The UTF-8 bytes of the token; a character may consist of several tokens."""


class TokenLogprob(TopLogprob):
    """A generated token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ApiObject):
    content: list[TokenLogprob]


class CompletionLogprobs(ApiObject):
    """Four parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt."""
    top_logprobs: list[dict[str, float | None] | None]
    """The most likely tokens at each position; null for the first token of a prompt."""
    text_offset: list[int]
    """Number of characters before each token."""


class PromptLogprob(ApiObject):
    """A token in one place of the prompt."""

    logprob: float
    rank: int | None
    """1 for the likeliest token; null where it is not among the likeliest that are returned."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id; null for the prompt's first token."""
