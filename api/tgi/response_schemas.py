"""Shapes of the answers of TGI's routes, for their description at /docs. The answers are built in
`answer.py`.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from api.http.openapi import ErrorResponses, error_responses

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class TgiObject(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Token(TgiObject):
    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillToken(TgiObject):
    """Of the prompt; nothing is known of the first one's log-probability."""

    id: int
    text: str
    logprob: float | None


class GenerationDetails(TgiObject):
    """How one answer came about; `prefill` is empty and `top_tokens` absent where they were not asked for."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] = []


class BestOfSequence(GenerationDetails):
    generated_text: str


class Details(GenerationDetails):
    best_of_sequences: list[BestOfSequence] = []


class GenerateResponse(TgiObject):
    """`details` only where they were asked for."""

    generated_text: str
    details: Details = None  # type: ignore[assignment]  # absent, not null


class StreamDetails(TgiObject):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(TgiObject):
    """One frame, `data: {…}`. The last one has the whole text; where the request failed it is an
    ErrorResponse.
    """

    index: int
    token: Token
    top_tokens: list[Token] = []
    generated_text: str | None
    details: StreamDetails | None


class SimpleToken(TgiObject):
    """`start` and `stop`: the bytes of the input that it stands for."""

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeResponse(TgiObject):
    tokenize_response: list[SimpleToken]
    templated_text: str


class Info(TgiObject):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None


class ErrorResponse(TgiObject):
    error: str
    error_type: str


ERROR_RESPONSES = error_responses(
    ErrorResponse,
    {
        400: "The body is not JSON",
        401: "The API key is missing or wrong",
        404: "There is no such model",
        413: "The body is too large",
        415: "The body is not announced as JSON",
        422: "A field is wrong, or not served",
        424: "The request failed while it was generated",
        429: "The fleet is overloaded",
        500: "Internal error",
        503: "No worker, or no broker",
    },
)

TOKENIZE_ERRORS: ErrorResponses = {
    status: ERROR_RESPONSES[status] for status in (400, 401, 404, 413, 415, 422, 500, 503)
}
GENERATE_ERRORS: ErrorResponses = {
    status: ERROR_RESPONSES[status] for status in (400, 401, 413, 415, 422, 424, 429, 500, 503)
}
"""What a route may answer besides 200."""
