"""Response bodies of the Responses API, for /docs. `api/protocols/response_object.py` makes them."""

from typing import Any, Literal

from api.http.openapi import ApiObject


class ResponsesObject(ApiObject, extra="allow"):
    """An object of the Responses API; it may have more fields."""


class InputTokensDetails(ResponsesObject):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(ResponsesObject):
    reasoning_tokens: int


class ResponseUsage(ResponsesObject):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(ResponsesObject):
    reason: Literal["max_output_tokens"]


class ResponseError(ResponsesObject):
    code: str
    message: str


class ResponseItem(ResponsesObject):
    """An item of a conversation: a message, a call of a function, its output, or reasoning."""

    id: str
    type: Literal["message", "function_call", "function_call_output", "reasoning"]


class ResponseObject(ResponsesObject):
    """A response, with the fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    """Unix time of the request, in seconds."""
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[ResponseItem]
    usage: ResponseUsage | None
    """Null until the response is completed or incomplete."""
    metadata: dict[str, str]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool


class ResponseEvent(ResponsesObject):
    """One event of a stream; `response.completed`, `.incomplete` or `.failed` is the last."""

    type: str
    sequence_number: int


class ResponseItemList(ResponsesObject):
    object: Literal["list"]
    data: list[ResponseItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(ResponsesObject):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
