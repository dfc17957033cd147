"""Request body of the Responses API. Fields of OpenAI that this server does not support are refused by name.
Unknown names are ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from api.errors import invalid
from api.http.body import UnsupportedFields, reject_unsupported
from api.openai.request_schemas import EFFORT, FORMAT_SCHEMA, MAX_TOKENS
from api.requests.fields import Listed, ServedFields, Strict, Whole, least, with_one_error
from api.requests.logits import FIELDS as LOGITS_FIELDS
from api.responses.input_items import ROLES
from api.webhooks.field import WebhookField

LOGPROBS = "message.output_text.logprobs"
MAX_LABELS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
UNSUPPORTED: UnsupportedFields = {
    "access_programs": (),
    "background_options": (),
    "beam_search_diversity_rate": (0.0,),
    "beam_width": (1,),
    "context_management": ([],),
    "conversation": (),
    "diversity": (0.0,),
    "early_stopping": (False,),
    "image": (),
    "length_penalty": (1.0,),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "use_beam_search": (False,),
}
"""Fields that are refused by name."""

Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
]
Input = Annotated[str | Listed[dict[str, Any]], with_one_error("Input should be a string or a list of items")]

TEXT_PART_SCHEMA: Any = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
    "description": "For models that see, a part may be a picture: `input_image` with `image_url`, a URL.",
}
MESSAGE_SCHEMA: Any = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "id": {"type": ["string", "null"]},
        "type": {"enum": ["message", None]},
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART_SCHEMA}]},
    },
}
INPUT_SCHEMA: Any = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": MESSAGE_SCHEMA}]}
TOOL_SCHEMA: Any = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
METADATA_SCHEMA: Any = {
    "maxProperties": MAX_LABELS,
    "propertyNames": {"maxLength": MAX_KEY_CHARS},
    "additionalProperties": {"type": "string", "maxLength": MAX_VALUE_CHARS},
}


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = Field(
        default=None,
        description="Only false is supported: events have no padding.",
        json_schema_extra={"const": False},
    )


class TextOptions(Strict):
    format: dict[str, Any] | None = Field(
        default=None,
        description='What the text must look like: `{"type": "json_schema", "name": …, "schema": …}`, '
        '`{"type": "json_object"}` or `{"type": "text"}`.',
        json_schema_extra=FORMAT_SCHEMA,
    )
    verbosity: str | None = Field(default=None, description="Has no effect.")


class ReasoningOptions(Strict):
    effort: str | None = EFFORT
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None,
        description="With any value, the reasoning is shown as its own summary.",
    )


class ResponsesRequest(ServedFields):
    """The body of /v1/responses, with the sampling parameters of vLLM. Null and absent mean the default.

    `user`, `safety_identifier`, `prompt_cache_key` and other labels have no effect.
    """

    input: Input = Field(
        description="A text, or the items of a conversation: messages, calls of functions and their outputs, "
        "references to items of stored responses.",
        json_schema_extra=INPUT_SCHEMA,
    )
    instructions: str | None = Field(
        default=None, description="A system message before the conversation, for this response only."
    )
    webhook: WebhookField | None = None
    max_output_tokens: Whole | None = least(1, MAX_TOKENS)
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(
        default=None,
        description="Keep the response, so that it can be retrieved and continued. Default: true.",
    )
    background: bool | None = Field(
        default=None,
        description="Respond at once; the response is made without a client, and retrieved. Default: false.",
    )
    previous_response_id: str | None = Field(
        default=None, description="A stored response whose conversation goes on with `input`."
    )
    metadata: dict[str, str] | None = Field(
        default=None,
        description="Up to 16 labels; the response has them, too.",
        json_schema_extra=METADATA_SCHEMA,
    )
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Listed[dict[str, Any]] | None = Field(
        default=None,
        description='Functions that the model may call: `{"type": "function", "name": …, "parameters": …}`. '
        "Tools that only OpenAI's servers or models have (`web_search`, `namespace`, …) are left out of the "
        "prompt.",
        json_schema_extra={"items": TOOL_SCHEMA},
    )
    tool_choice: str | dict[str, Any] | None = Field(
        default=None,
        description="`auto` (the default): the model decides. `none`: no calls. `required`: one call at "
        'least. `{"type": "function", "name": …}`: one call of this function. '
        '`{"type": "allowed_tools", "mode": "auto", "tools": […]}`: only these.',
        json_schema_extra={"enum": ["auto", "none", None]},
    )
    parallel_tool_calls: bool | None = None
    max_tool_calls: Whole | None = Field(default=None, description="Has no effect: no tool is built in.")
    truncation: Literal["disabled"] | None = Field(
        default=None, description="`disabled`: an input that does not fit into the context is refused."
    )
    include: Listed[Included] | None = Field(
        default=None, description="Additional parts of the output; no tool is built in to have any."
    )
    top_logprobs: Whole | None = least(
        0, f"The number of likeliest tokens to report; `include` must have `{LOGPROBS}`."
    )
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or [])

    def check(self) -> None:
        """Raises ApiError for unsupported fields and contradictions."""
        reject_unsupported(self.model_extra or {}, UNSUPPORTED, LOGITS_FIELDS)
        if self.background and not self.is_stored:
            raise invalid(
                "`background` needs `store`: true, so that the response can be retrieved", "background"
            )
        if self.background and self.resume_s is not None:
            raise invalid("`background` waits for no client: leave `resume_s` out", "resume_s")
        if self.stream_options is not None and not self.stream:
            raise invalid("`stream_options` is only allowed with `stream`: true", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise invalid(f"`{name}` is not supported yet", name)
        if self.top_logprobs and not self.has_logprobs:
            raise invalid(f"`top_logprobs` needs `{LOGPROBS}` in `include`", "top_logprobs")
        check_metadata(self.metadata or {})


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises ApiError if there are more or longer labels than OpenAI accepts."""
    if len(metadata) > MAX_LABELS:
        raise invalid(f"`metadata` has at most {MAX_LABELS} pairs. Given: {len(metadata)}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            raise invalid(
                f"`metadata` has keys of at most {MAX_KEY_CHARS} and values of at most {MAX_VALUE_CHARS} "
                f"characters. Given: {len(key)} and {len(value)}",
                "metadata",
            )
