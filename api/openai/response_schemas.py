"""Response bodies of OpenAI's routes, described for /docs. `api/protocols/openai.py` makes them."""

from typing import Any, Literal

from api.answers.logits import Logits
from api.answers.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from api.http.openapi import Absent, ApiObject, error_responses

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class CompletionTokensDetails(ApiObject):
    reasoning_tokens: int


class PromptTokensDetails(ApiObject):
    cached_tokens: int
    """Tokens whose KV was in the prefix cache."""


class Usage(ApiObject):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails = Absent
    """Of a model that reasons."""
    prompt_tokens_details: PromptTokensDetails = Absent
    """In a whole response and in the last chunk; not in the counts of other chunks."""


class CompletionObject(ApiObject):
    id: str
    created: int
    """Unix time of the request, in seconds."""
    model: str
    system_fingerprint: str


class FinishedChoice(ApiObject):
    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or token id that ended the choice."""
    token_ids: list[int] = Absent
    """With `return_token_ids`."""
    cumulative_logprob: float = Absent
    """Of a beam search: the sum of the log-probabilities of its tokens."""
    beam_score: float = Absent
    """Of a beam search: that sum, divided by the number of tokens to the power of `length_penalty`."""


class ChunkChoice(ApiObject):
    index: int
    finish_reason: FinishReason | None
    """Null until the last chunk of the choice."""
    stop_reason: str | int | None = None
    """The stop string or token id that ended the choice."""
    token_ids: list[int] = Absent
    """With `return_token_ids`: of the tokens of this chunk."""
    cumulative_logprob: float = Absent
    beam_score: float = Absent
    """Of a beam search, in the last chunk of the choice."""


# --- chat ---------------------------------------------------------------------------------------------------


class CalledFunction(ApiObject):
    name: str
    arguments: str
    """JSON text, which may be cut at `max_tokens`."""


class ToolCall(ApiObject):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(ApiObject):
    role: Literal["assistant"]
    content: str | None
    """Null if the answer has only calls."""
    refusal: None
    reasoning_content: str = Absent
    reasoning: str = Absent
    """The same as `reasoning_content`."""
    tool_calls: list[ToolCall] = Absent
    function_call: CalledFunction = Absent
    """The call, if the request has `functions`."""


class ChatChoice(FinishedChoice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    context_logits: Logits = Absent
    """With `return_context_logits`, in the first choice of a prompt."""
    generation_logits: Logits = Absent
    """With `return_generation_logits`."""


class ChatCompletion(CompletionObject):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = Absent
    """With `return_token_ids`."""
    prompt_logprobs: PromptLogprobs = Absent


class CalledFunctionDelta(ApiObject):
    name: str = Absent
    """In the first delta of a call only."""
    arguments: str
    """The next piece of the JSON text."""


class ToolCallDelta(ApiObject):
    """The next piece of the call with this index; the first one has `id`, `type` and the name."""

    index: int
    id: str = Absent
    type: Literal["function"] = Absent
    function: CalledFunctionDelta


class Delta(ApiObject):
    role: Literal["assistant"] = Absent
    """In the first chunk of a choice only."""
    content: str | None = Absent
    reasoning_content: str = Absent
    reasoning: str = Absent
    """The same as `reasoning_content`."""
    tool_calls: list[ToolCallDelta] = Absent
    function_call: CalledFunctionDelta = Absent


class ChatChunkChoice(ChunkChoice):
    delta: Delta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(CompletionObject):
    """One event, `data: {…}`. A request that fails ends with an OpenAIError, others with `data: [DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] = Absent
    """With `return_token_ids`, in the first chunk of a choice."""


# --- completion ---------------------------------------------------------------------------------------------


class CompletionChoice(FinishedChoice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] = Absent
    """With `return_token_ids`."""
    prompt_logprobs: PromptLogprobs = Absent
    context_logits: Logits = Absent
    """With `return_context_logits`, in the first choice of a prompt."""
    generation_logits: Logits = Absent
    """With `return_generation_logits`."""


class Completion(CompletionObject):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(ChunkChoice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] = Absent
    """With `return_token_ids`, in the first chunk of a choice."""


class CompletionChunk(CompletionObject):
    """One event, `data: {…}`. A request that fails ends with an OpenAIError, others with `data: [DONE]`."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


# --- models and errors --------------------------------------------------------------------------------------


class Model(ApiObject):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Absent
    """Of a LoRA adapter: where its files are."""
    parent: str = Absent
    """Of a LoRA adapter: the model that it changes."""
    task: str = Absent
    """Of a model that makes vectors or scores: `embed` or `classify`."""


class ModelList(ApiObject):
    object: Literal["list"]
    data: list[Model]
    models: list[dict[str, Any]]
    """Codex's own catalogue: empty."""


class ErrorDetail(ApiObject):
    message: str
    type: str
    param: str | None
    """The field that is wrong."""
    code: str | None
    """The cause, if it has a name; for a request that failed: `timeout`, `unavailable`, `cancelled`,
    `shutdown`, `superseded` or `generation`.
    """


class OpenAIError(ApiObject):
    error: ErrorDetail


CAUSES = {
    401: "The API key is missing or wrong",
    403: "A page of another origin has sent the request",
    404: "There is no such model",
    408: "The deadline passed before the request was finished",
    413: "The body is too large",
    415: "The Content-Type is not application/json",
    429: "Too many requests",
    503: "No worker is ready, or the broker does not answer",
}
"""Causes of errors that mean the same in all APIs, by status."""
ERROR_RESPONSES = error_responses(
    OpenAIError,
    CAUSES
    | {
        400: "The body is not JSON, or the field `param` is wrong or not supported",
        500: "Internal error, or the request failed during generation",
    },
)
"""All error responses by status."""
