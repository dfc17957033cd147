"""Shapes of the answers of OpenAI's routes, for their description at /docs. The answers are built in
`answer_chat.py` and `answer_completion.py`.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from api.http.openapi import error_responses, event_stream

FinishReason = Literal["stop", "length"]


class OpenAIObject(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Usage(OpenAIObject):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionObject(OpenAIObject):
    id: str
    created: int
    model: str
    system_fingerprint: str


class FinishedChoice(OpenAIObject):
    """`stop_reason`: the stop string or id that ended the choice."""

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChunkChoice(OpenAIObject):
    index: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


# --- chat ---------------------------------------------------------------------------------------------------


class TopLogprob(OpenAIObject):
    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(OpenAIObject):
    content: list[TokenLogprob]


class AssistantMessage(OpenAIObject):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(FinishedChoice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(CompletionObject):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class Delta(OpenAIObject):
    """The first one of a choice has the role."""

    role: Literal["assistant"] = None  # type: ignore[assignment]  # absent, not null
    content: str


class ChatChunkChoice(ChunkChoice):
    delta: Delta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(CompletionObject):
    """One frame, `data: {…}`. Where the request failed it is an OpenAIError; the last one is `data: [DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


# --- completion ---------------------------------------------------------------------------------------------


class CompletionLogprobs(OpenAIObject):
    """Nothing is known of the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(FinishedChoice):
    text: str
    logprobs: CompletionLogprobs | None


class Completion(CompletionObject):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(ChunkChoice):
    text: str
    logprobs: CompletionLogprobs | None


class CompletionChunk(CompletionObject):
    """One frame, `data: {…}`. Where the request failed it is an OpenAIError; the last one is `data: [DONE]`."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


# --- models and errors --------------------------------------------------------------------------------------


class Model(OpenAIObject):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(OpenAIObject):
    object: Literal["list"]
    data: list[Model]


class ErrorDetail(OpenAIObject):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(OpenAIObject):
    error: ErrorDetail


ERROR_RESPONSES = error_responses(
    OpenAIError,
    {
        400: "The body is not JSON, or a field is wrong or not served: `param` names it",
        401: "The API key is missing or wrong",
        404: "There is no such model",
        413: "The body is too large",
        415: "The body is not announced as JSON",
        429: "The fleet is overloaded",
        500: "Internal error, or the request failed while it was generated",
        503: "No worker, or no broker",
    },
)
"""What a route that takes a body may answer besides 200."""


def response_or_chunks(
    whole: type[CompletionObject], chunk: type[CompletionObject]
) -> dict[int | str, dict[str, Any]]:
    """A route's `responses` where `stream` decides between the two."""
    return {200: {"model": whole, "content": event_stream(chunk, "[DONE]")}}
