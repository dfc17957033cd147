"""Shapes of the bodies of OpenAI's routes, with what vLLM and TGI add to them. Nothing is converted (`"5"` is
no number).

What these APIs know and this one does not serve is refused by name, and so is what only another route has;
names that nobody knows are ignored.
"""

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from api.errors import invalid
from api.http.unsupported import UnsupportedFields, reject_unsupported
from api.inference.fields import Listed, least, ranged
from api.inference.ranges import BIASES, MAX_STOP_CHARS

UNSUPPORTED: UnsupportedFields = {
    "allowed_token_ids": (),
    "audio": (),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "documents": (),
    "ec_transfer_params": (),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": (),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none",),
    "tool_prompt": (),
    "tools": ([],),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": (),
    "watermarking": (False,),
    "web_search_options": (),
}
TGI_FIELDS = frozenset(
    {
        "adapter_id",
        "decoder_input_details",
        "details",
        "do_sample",
        "max_new_tokens",
        "min_new_tokens",
        "return_full_text",
        "top_n_tokens",
        "truncate",
        "watermark",
    }
)
"""Parameters that only TGI's routes have."""


def with_one_error(words: str) -> WrapValidator:
    """For a field of several shapes: one error in place of one for each shape."""

    def check(value: Any, shapes: ValidatorFunctionWrapHandler) -> Any:
        try:
            return shapes(value)
        except ValidationError as error:
            raise PydanticCustomError("shape", words) from error

    return WrapValidator(check)


Stop = Annotated[str | Listed[str], with_one_error("Input should be a string or a list of strings")]
Prompt = Annotated[
    str | Listed[str] | Listed[int] | Listed[Listed[int]],
    with_one_error(
        "Input should be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    ),
]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = Field(
        default=None, description="a last chunk without choices says how many tokens there were"
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="with include_usage: every chunk says how many tokens there were"
    )


class OpenAIRequest(BaseModel):
    """What both routes have. A field that is null or absent has its default.

    `user`, `metadata`, `store` and the like are labels: accepted, and without effect.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = Field(
        default=None, description="a served model; null, empty, `tgi` and `dummy` mean the one that is"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: int | None = least(1, "default: what is left of the context")
    min_tokens: int | None = least(0, "before it has so many, nothing but `max_tokens` ends an answer")
    stop: Stop | None = Field(
        default=None,
        description="the answer ends before the first of these",
        json_schema_extra={
            "minLength": 1,
            "maxLength": MAX_STOP_CHARS,
            "items": {"minLength": 1, "maxLength": MAX_STOP_CHARS},
        },
    )
    stop_token_ids: Listed[int] | None = Field(
        default=None, description="ids that end the answer", json_schema_extra={"items": {"minimum": 0}}
    )
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = Field(default=None, description="go on behind the end-of-sequence token")
    skip_special_tokens: bool | None = Field(default=None, description="default: true")
    add_special_tokens: bool | None = Field(
        default=None, description="default: true for a prompt, false for a chat: its template has them"
    )
    truncate_prompt_tokens: int | None = least(1, "the prompt's last so many tokens are used")
    n: int | None = ranged("n", "answers to each prompt")

    temperature: float | None = ranged("temperature", "default 1; 0 is greedy")
    top_k: int | None = ranged("top_k", "0 and -1 are off")
    top_p: float | None = ranged("top_p")
    top_p_decay: float | None = ranged("top_p_decay", "what `top_p` is multiplied with after each token")
    top_p_min: float | None = ranged(
        "top_p_min", "below which `top_p_decay` does not take it; default 0.000001"
    )
    top_p_reset_ids: Listed[int] | None = Field(
        default=None,
        description="token ids after which `top_p` is as given again",
        json_schema_extra={"items": {"minimum": 0}},
    )
    min_p: float | None = ranged("min_p")
    typical_p: float | None = ranged("typical_p")
    repetition_penalty: float | None = ranged("repetition_penalty")
    frequency_penalty: float | None = ranged("frequency_penalty")
    presence_penalty: float | None = ranged("presence_penalty")
    seed: int | None = ranged("seed", "default: drawn by chance")
    logit_bias: dict[str, float] | None = Field(
        default=None,
        description="token id → what is added to its logit",
        json_schema_extra={
            "propertyNames": {"pattern": "^[0-9]{1,6}$"},
            "additionalProperties": {"type": "number", **BIASES.schema},
        },
    )
    bad_words: Listed[str] | None = Field(
        default=None, description="words that do not appear", json_schema_extra={"items": {"pattern": r"\S"}}
    )
    echo: bool | None = None

    def check(self) -> None:
        """Raises ApiError for what is not served, and for fields that contradict each other."""
        reject_unsupported(self.model_extra or {}, UNSUPPORTED, OPENAI_FIELDS | TGI_FIELDS)
        if self.stream_options is not None and not self.stream:
            raise invalid("`stream_options` is only allowed with `stream`: true", "stream_options")


class ContentPart(BaseModel):
    """Of a message's content; only the type `text` is served."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"required": ["type", "text"]})

    type: str = Field(json_schema_extra={"enum": ["text"]})
    text: str | None = Field(default=None, json_schema_extra={"type": "string"})


ROLES = ("system", "developer", "user", "assistant")


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"required": ["role", "content"]})

    role: str = Field(json_schema_extra={"enum": list(ROLES)})
    content: str | Listed[ContentPart] | None = Field(
        default=None, json_schema_extra={"type": ["string", "array"]}
    )
    name: str | None = None


class ChatRequest(OpenAIRequest):
    """Body of /v1/chat/completions."""

    messages: Listed[ChatMessage] = Field(json_schema_extra={"minItems": 1})
    max_completion_tokens: int | None = least(1, "the newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = least(0, "so many of the likeliest tokens are told with each token")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        default=None, description="default: whether the last message is the assistant's"
    )
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(OpenAIRequest):
    """Body of /v1/completions."""

    max_tokens: int | None = least(
        0, "default: what is left of the context; 0, with `echo`, shows the prompt only"
    )

    prompt: Prompt = Field(
        json_schema_extra={
            "minLength": 1,
            "minItems": 1,
            "items": {"minLength": 1, "minItems": 1, "minimum": 0, "items": {"minimum": 0}},
        }
    )
    logprobs: int | None = least(
        0, "so many of the likeliest tokens are told with each token; with `echo` of the prompt's, too"
    )

    @property
    def shows_prompt_only(self) -> bool:
        """A token is generated all the same: what is known of a prompt comes with the first one."""
        return bool(self.echo) and self.max_tokens == 0


OPENAI_FIELDS = frozenset({*ChatRequest.model_fields, *CompletionRequest.model_fields, *UNSUPPORTED})
"""What clients of these routes know."""
