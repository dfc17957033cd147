"""Response bodies of Anthropic's Messages API, for /docs. `api/protocols/messages.py` makes them."""

from typing import Any, Literal

from api.http.openapi import ApiObject, error_responses
from api.openai.response_schemas import CAUSES


class AnthropicObject(ApiObject, extra="allow"):
    """An object of the Messages API; it may have more fields."""


class MessageUsage(AnthropicObject):
    """Token counts. The prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    """Tokens whose KV was in the prefix cache."""
    output_tokens: int
    service_tier: Literal["standard", "priority", "batch"]


class ContentBlock(AnthropicObject):
    type: Literal["text", "thinking", "tool_use"]


class MessageObject(AnthropicObject):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    """`max_tokens` also where the model's context is full; null while the message is made."""
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(AnthropicObject):
    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]


class TokenCount(ApiObject):
    input_tokens: int


class ModelInfo(ApiObject):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    """RFC 3339; the time at which the gateway started, or the adapter was added."""


class ModelInfoPage(ApiObject):
    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    """What `after_id` is for the next page; null if this one is empty."""
    has_more: bool


class AnthropicError(ApiObject):
    type: Literal["error"]
    error: dict[str, Any]
    """`type` and `message`."""


ERROR_RESPONSES = error_responses(
    AnthropicError,
    CAUSES
    | {
        400: "The body is not JSON, or a field is wrong or not supported",
        500: "Internal error, or the request failed during generation",
    },
)
"""All error responses by status."""
