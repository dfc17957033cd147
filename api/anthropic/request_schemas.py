"""Request bodies of Anthropic's Messages API, with the sampling parameters of vLLM. Fields of Anthropic that
this server does not support are refused by name. Unknown names are ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from api.errors import invalid
from api.http.body import UnsupportedFields, reject_unsupported
from api.openai.request_schemas import OPENAI_FIELDS
from api.requests.fields import Listed, ServedFields, Strict, Whole, with_one_error
from api.requests.service_terms import TIERS
from api.webhooks.field import WebhookField
from common.settings.ranges import MAX_STOP_CHARS

UNSUPPORTED: UnsupportedFields = {"container": (), "mcp_servers": ([],)}
"""Fields that are refused by name."""
TIERS_OF_ANTHROPIC = {"standard_only": "default"}
"""Anthropic's service tiers → OpenAI's, where they differ."""

FORMAT_SCHEMA: Any = {
    "required": ["type", "schema"],
    "properties": {"type": {"const": "json_schema"}, "schema": {"enum": [{"type": "object"}]}},
}
"""The format that /docs proposes."""
TEXT_BLOCKS = "Input should be a string or a list of blocks, each an object with a `type`"


class InputBlock(Strict, extra="allow", json_schema_extra={"required": ["type", "text"]}):
    """A block of a content. `cache_control` and `citations` have no effect."""

    type: str = Field(json_schema_extra={"enum": ["text"]})
    text: str | None = Field(default=None, json_schema_extra={"type": "string"})
    source: dict[str, Any] | None = Field(
        default=None,
        description='Of an `image`: `{"type": "base64", "media_type": …, "data": …}` or '
        '`{"type": "url", "url": …}`; of a `document`: `{"type": "text", "data": …}`.',
    )
    id: str | None = Field(default=None, description="Of a `tool_use`, as a message had it.")
    name: str | None = Field(default=None, description="Of a `tool_use`: the tool.")
    input: dict[str, Any] | None = Field(default=None, description="Of a `tool_use`: the arguments.")
    tool_use_id: str | None = Field(default=None, description="Of a `tool_result`: the call's `id`.")
    content: Any = Field(default=None, description="Of a `tool_result`: a text, or blocks.")
    thinking: str | None = Field(default=None, description="Of a `thinking` block: the reasoning.")


Content = Annotated[str | Listed[InputBlock], with_one_error(TEXT_BLOCKS)]


class InputMessage(Strict, extra="allow"):
    role: Literal["user", "assistant", "system"]
    content: Content


class ClientTool(Strict, extra="allow", json_schema_extra={"required": ["name", "input_schema"]}):
    """A tool. Only those with an `input_schema` can be called: tools that Anthropic's servers run, and those
    whose schema Anthropic's models have learnt, are left out of the prompt.
    """

    type: str | None = Field(default=None, json_schema_extra={"enum": ["custom", None]})
    name: str | None = Field(
        default=None, json_schema_extra={"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
    )
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(
        default=None,
        description="JSON schema of the arguments, an object's.",
        json_schema_extra={"type": "object", "properties": {"type": {"const": "object"}}},
    )
    strict: bool | None = Field(
        default=None, description="Arguments match the schema, whatever `tool_choice` says."
    )

    @property
    def is_callable(self) -> bool:
        return self.type in (None, "custom")


class ChosenTool(Strict, extra="allow"):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(
        default=None, description="Whether there is at most one call. Default: false."
    )


class ThinkingOptions(Strict, extra="allow"):
    """Whether the model reasons first, if its template can say so. `budget_tokens` has no effect."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputConfig(Strict, extra="allow"):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="How much the model reasons, if its template can say so."
    )
    format: dict[str, Any] | None = Field(
        default=None,
        description='What the text must look like: `{"type": "json_schema", "schema": …}`.',
        json_schema_extra=FORMAT_SCHEMA,
    )


class CountTokensRequest(ServedFields):
    """The body of /v1/messages/count_tokens. Null and absent mean the default.

    `metadata`, `cache_control`, `context_management`, `speed` and other labels and hints have no effect.
    """

    messages: Listed[InputMessage] = Field(
        description="The chat so far. Turns of the same role in a row are one turn; a last turn of the "
        "assistant is continued.",
        json_schema_extra={"minItems": 1},
    )
    system: Content | None = Field(default=None, description="The system prompt: a text, or blocks of it.")
    tools: Listed[ClientTool] | None = Field(default=None, description="Tools that the model may call.")
    tool_choice: ChosenTool | None = Field(
        default=None,
        description='`{"type": "auto"}` (the default): the model decides. `none`: no calls. `any`: one call '
        'at least. `{"type": "tool", "name": …}`: one call of this tool.',
        json_schema_extra={"properties": {"type": {"enum": ["auto", "none"]}}, "required": ["type"]},
    )
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Listed[str] | None = Field(
        default=None,
        description="Stop strings: the text ends before the first of them that appears.",
        json_schema_extra={"items": {"minLength": 1, "maxLength": MAX_STOP_CHARS}},
    )
    service_tier: str | None = Field(
        default=None,
        description="`auto` and `standard_only` are the class `standard`; OpenAI's names are taken, too.",
        json_schema_extra={"enum": ["auto", "standard_only", None]},
    )

    def check(self) -> None:
        """Raises ApiError for unsupported fields."""
        reject_unsupported(self.model_extra or {}, UNSUPPORTED, OPENAI_FIELDS - {"max_tokens"})

    @property
    def tier(self) -> str | None:
        """The tier by OpenAI's name. Raises ApiError."""
        given = self.service_tier
        tier = TIERS_OF_ANTHROPIC.get(given, given) if given is not None else None
        if tier is not None and tier not in TIERS:
            allowed = ", ".join((*TIERS_OF_ANTHROPIC, *TIERS))
            raise invalid(f"`service_tier` must be one of {allowed}", "service_tier")
        return tier


class MessagesRequest(CountTokensRequest):
    """The body of /v1/messages. Null and absent mean the default.

    `metadata`, `cache_control`, `context_management`, `speed` and other labels and hints have no effect.
    """

    max_tokens: Whole = Field(
        description="The most tokens to generate; no more than the model's context leaves.",
        json_schema_extra={"minimum": 1},
    )
    webhook: WebhookField | None = None
