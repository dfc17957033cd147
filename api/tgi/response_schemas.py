"""Response bodies of TGI's routes, described for /docs. `api/protocols/tgi.py` makes them."""

from typing import Literal

from api.answers.logits import Logits
from api.http.openapi import Absent, ApiObject, ErrorResponses, error_responses, only
from api.openai.response_schemas import CAUSES

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class Token(ApiObject):
    """A generated token."""

    id: int
    text: str
    logprob: float | None
    special: bool
    """Whether it is a special token, such as end of sequence."""


class PrefillToken(ApiObject):
    """A token of the prompt."""

    id: int
    text: str
    logprob: float | None
    """Null for the first token of the prompt."""


class GenerationEnd(ApiObject):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    """The seed that samples the same text again; null for greedy decoding."""
    cumulative_logprob: float = Absent
    """Of a beam search: the sum of the log-probabilities of its tokens."""
    beam_score: float = Absent
    """Of a beam search: that sum, divided by the number of tokens to the power of `length_penalty`."""


class GenerationDetails(GenerationEnd):
    prefill: list[PrefillToken]
    """The prompt's tokens; empty without `decoder_input_details`."""
    tokens: list[Token]
    top_tokens: list[list[Token]] = Absent
    """The most likely tokens at each position; absent without `top_n_tokens`."""


class BestOfSequence(GenerationDetails):
    """A text that was not the best of `best_of`, or of a beam search."""

    generated_text: str


class Details(GenerationDetails):
    """How the text was generated."""

    best_of_sequences: list[BestOfSequence] = Absent
    """The other texts of `best_of`, or of a beam search."""


class GenerateResponse(ApiObject):
    generated_text: str
    details: Details = Absent
    """Absent unless requested."""
    context_logits: Logits = Absent
    """With `return_context_logits`."""
    generation_logits: Logits = Absent
    """With `return_generation_logits`."""


class Predictions(ApiObject):
    """The body of /vertex."""

    predictions: list[str]
    """A text for each instance, in their order."""


class StreamDetails(GenerationEnd):
    """How the text was generated."""

    input_length: int
    """Number of tokens of the prompt."""
    prefill: list[PrefillToken] = Absent
    tokens: list[Token] = Absent
    """Of a beam search: all tokens of the sequence."""


class StreamResponse(ApiObject):
    """One event, `data: {…}`. If the request fails, the last event is an ErrorResponse instead."""

    index: int
    """Number of the token, from 1; of a beam search, of the sequence, the best first."""
    token: Token
    top_tokens: list[Token] = Absent
    """The most likely tokens at this position; absent without `top_n_tokens`."""
    generated_text: str | None
    """The whole text, in the last event; of a beam search, in every event."""
    details: StreamDetails | None
    """In the last event, or every one of a beam search, if requested."""


class SimpleToken(ApiObject):
    """A token of a text."""

    id: int
    text: str
    start: int
    """Offset of its first byte in the UTF-8 text."""
    stop: int
    """Offset after its last byte."""


class ChatTokenizeResponse(ApiObject):
    tokenize_response: list[SimpleToken]
    templated_text: str
    """The prompt that the chat template makes of the messages."""


class Info(ApiObject):
    """The model and its limits."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_beam_width: int
    """Most sequences that a beam search extends at once."""
    max_stop_sequences: int
    max_input_tokens: int
    """Most tokens of a prompt."""
    max_total_tokens: int
    """Most tokens of prompt and generated text together."""
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    adapters: list[str]
    """Names of the LoRA adapters that a request may use, as `adapter_id` or as `model`."""


class ServerLoad(ApiObject):
    """vLLM's answer of /load."""

    server_load: int
    """Requests for tokens that this gateway has now."""


class ErrorResponse(ApiObject):
    error: str
    """What is wrong."""
    error_type: str


ERROR_RESPONSES = error_responses(
    ErrorResponse,
    CAUSES
    | {
        400: "The body is not JSON",
        422: "A field is wrong or not supported",
        424: "The request failed during generation",
        500: "Internal error",
    },
)
"""All error responses by status."""

TOKENIZE_ERRORS: ErrorResponses = only(ERROR_RESPONSES, 400, 401, 403, 404, 413, 415, 422, 500, 503)
GENERATE_ERRORS: ErrorResponses = only(ERROR_RESPONSES, 400, 401, 403, 408, 413, 415, 422, 424, 429, 500, 503)
