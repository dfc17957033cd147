"""Request bodies of OpenAI's routes, with the additions of vLLM and TGI. Fields of these APIs that this
server does not support are refused by name, and so are those that only other routes have. Unknown names are
ignored.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import Field

from api.answers.answer import Rendering
from api.errors import invalid, quoted
from api.grammar.compile import Grammar
from api.grammar.read import FIELDS, read_grammar
from api.http.body import UnsupportedFields, reject_unsupported
from api.requests.beams import BeamFields
from api.requests.chat_prompt import EFFORTS, TOOL_PROMPT, ChatMessage
from api.requests.fields import (
    BIAS_SCHEMA,
    DETACHED,
    LOGITS_DTYPE,
    RETURN_CONTEXT_LOGITS,
    RETURN_GENERATION_LOGITS,
    Listed,
    LogitsDtype,
    SamplingFields,
    ServedFields,
    Strict,
    Whole,
    least,
    ranged,
    with_one_error,
)
from api.requests.logits import check_not_streamed
from api.requests.params import SWITCHES
from api.requests.tools import FunctionSchema, ToolSchema
from api.webhooks.field import WebhookField
from common.settings.ranges import MAX_STOP_CHARS

Stop = Annotated[str | Listed[str], with_one_error("Input should be a string or a list of strings")]
Prompt = Annotated[
    str | Listed[str] | Listed[Whole] | Listed[Listed[Whole]],
    with_one_error(
        "Input should be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    ),
]
Chosen = Annotated[str | dict[str, Any], with_one_error("Input should be a string or an object")]
CHOSEN_SCHEMA: Any = {"enum": ["none", "auto", None]}
"""The values of `tool_choice` that /docs proposes."""
FORMAT_SCHEMA: Any = {"required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}}
"""The formats of the text that /docs proposes."""
MAX_TOKENS = "The most tokens to generate. Default: what is left of the model's context."
EFFORT: Any = Field(
    default=None,
    description="How much the model thinks first, if its template can say so; with `none` not at all.",
    json_schema_extra={"enum": [*EFFORTS, None]},
)
UNSUPPORTED: UnsupportedFields = {
    "audio": (),
    "chat_template": (),
    "documents": (),
    "ec_transfer_params": (),
    "grammar": (),
    "kv_transfer_params": (),
    "logits_processors": (),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "request_id": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncation_side": ("left",),
    "vllm_xargs": (),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Fields that these routes refuse by name."""
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


class StreamOptions(Strict):
    include_usage: bool | None = Field(
        default=None, description="Send a last chunk that has no choices and the token counts in `usage`."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="With `include_usage`: send the token counts in every chunk."
    )


def guided_field(what: str) -> Any:
    """A field of older versions of vLLM."""
    schema: Any = {"minLength": 1, "minItems": 1, "items": {"minLength": 1}}
    return Field(default=None, description=f"vLLM's older form: {what}.", json_schema_extra=schema)


class OpenAIRequest(ServedFields, BeamFields):
    """Fields of both routes. Null and absent mean the default.

    `user`, `metadata`, `store`, `verbosity` and other labels and hints are accepted and have no effect.
    """

    stream_options: StreamOptions | None = None
    detached: bool | None = DETACHED
    webhook: WebhookField | None = None

    max_tokens: Whole | None = least(1, MAX_TOKENS)
    min_tokens: Whole | None = least(
        0, "The fewest tokens to generate: before them only `max_tokens` ends the text."
    )
    stop: Stop | None = Field(
        default=None,
        description="A stop string or several: the text ends before the first of them that appears.",
        json_schema_extra={
            "minLength": 1,
            "maxLength": MAX_STOP_CHARS,
            "items": {"minLength": 1, "maxLength": MAX_STOP_CHARS},
        },
    )
    include_stop_str_in_output: bool | None = Field(
        default=None, description="Let the text include its stop string or stop token. Default: false."
    )
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out. Default: true.")
    add_special_tokens: bool | None = Field(
        default=None,
        description="Add the special tokens that the tokenizer puts around a prompt. Default: true for "
        "completions; false for chats, whose template has them.",
    )
    truncate_prompt_tokens: Whole | None = least(
        -1, "The most tokens of the prompt to use: its last ones. -1: all that fit."
    )
    n: Whole | None = ranged("n", "The number of choices for each prompt. Default: 1.")
    best_of: Whole | None = Field(
        default=None,
        description="Must be 1 or `n`, because all generated texts are returned. With `use_beam_search`: the "
        "number of sequences that are extended at once.",
        json_schema_extra={"const": 1},
    )
    use_beam_search: bool | None = Field(
        default=None,
        description="vLLM's form of `beam_width`: a beam search of width `best_of`, by default `n`. Default: "
        "true if `beam_width` is given.",
        json_schema_extra={"enum": [False, None]},
    )
    frequency_penalty: float | None = ranged(
        "frequency_penalty", "Penalty for tokens by their number in the generated text, as OpenAI defines it."
    )
    logit_bias: dict[str, float] | None = Field(
        default=None,
        description="Numbers to add to the logits, by token id.",
        json_schema_extra=BIAS_SCHEMA,
    )
    prompt_logprobs: Whole | None = least(
        0,
        "Return the prompt's tokens with their log-probabilities, and this number of the most likely tokens "
        "at the position of each (vLLM). Not for streams.",
    )
    return_token_ids: bool | None = Field(
        default=None, description="Return the ids of the prompt's and of the generated tokens (vLLM)."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None,
        description="With `logprobs`: name tokens as `token_id:7`, because some are only a part of a "
        "character (vLLM).",
    )
    return_context_logits: bool | None = RETURN_CONTEXT_LOGITS
    return_generation_logits: bool | None = RETURN_GENERATION_LOGITS
    logits_dtype: LogitsDtype | None = LOGITS_DTYPE
    echo: bool | None = Field(
        default=None,
        description="Begin the text with the prompt; in a chat, with the assistant's message that is "
        "continued.",
    )

    response_format: dict[str, Any] | None = Field(
        default=None,
        description='What the text must look like: `{"type": "json_schema", "json_schema": {"schema": …}}`, '
        '`{"type": "json_object"}`, in vLLM\'s way `{"type": "structural_tag", "format": …}`, or in TGI\'s '
        '`{"type": "regex", "value": …}`.',
        json_schema_extra=FORMAT_SCHEMA,
    )
    structured_outputs: dict[str, Any] | None = Field(
        default=None,
        description="vLLM's form of `response_format`: an object with one of `json`, `regex`, `choice`, "
        "`grammar` (Lark or GBNF), `structural_tag` and `json_object`.",
        json_schema_extra={"required": ["json_object"], "properties": {"json_object": {"const": True}}},
    )
    guided_json: dict[str, Any] | str | None = guided_field("a JSON schema that the text satisfies")
    guided_regex: str | None = guided_field("a regex that the whole text matches")
    guided_choice: Listed[str] | None = guided_field("the text is one of these")
    guided_grammar: str | None = guided_field("a grammar (Lark or GBNF) that the text satisfies")
    guided_whitespace_pattern: str | None = Field(
        default=None, description="vLLM's older form: a regex for the white space of JSON."
    )
    guided_decoding_backend: str | None = Field(default=None, description="Has no effect.")

    def grammar(self) -> Grammar | None:
        """What the text must look like. Raises ApiError."""
        fields = {name: getattr(self, name) for name in FIELDS}
        return read_grammar(fields, self.guided_whitespace_pattern)

    @property
    def search_width(self) -> int | None:
        """The width of the beam search that is asked for; None for none."""
        if self.beam_width is not None or not self.use_beam_search:
            return self.beam_width
        return getattr(self, self.width_field) or 1

    @property
    def width_field(self) -> str:
        """The field that says the width of a beam search: vLLM has no `beam_width`."""
        given = [name for name in ("beam_width", "best_of") if getattr(self, name) is not None]
        return given[0] if given else "n"

    @property
    def rendering(self) -> Rendering:
        """How the answer is rendered."""
        options = self.stream_options
        return Rendering(
            usage=bool(options and options.include_usage),
            running_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            skip_special=self.skip_special_tokens is not False,
            include_stop=bool(self.include_stop_str_in_output),
            token_ids=bool(self.return_token_ids),
            names_by_id=bool(self.return_tokens_as_token_ids),
            prompt_tops=None if self.stream else self.prompt_logprobs,
        )

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """The body, completed by a model's defaults. As in vLLM, the model's default number of tokens is also
        the most that a request gets. Those that draw tokens are not for a beam search.
        """
        unused = () if self.search_width is None else SWITCHES
        filled = {
            name: value
            for name, value in defaults.items()
            if name in SamplingFields.model_fields and name not in unused and getattr(self, name) is None
        }
        if most := defaults.get("max_new_tokens"):
            lengths = {name: getattr(self, name, None) for name in ("max_tokens", "max_completion_tokens")}
            given = {name: min(length, most) for name, length in lengths.items() if length is not None}
            filled |= given or {"max_tokens": most}
        return self.model_copy(update=filled) if filled else self

    def check(self) -> None:
        """Raises ApiError for unsupported fields and contradictions."""
        reject_unsupported(self.model_extra or {}, UNSUPPORTED, OPENAI_FIELDS | TGI_FIELDS)
        if self.stream_options is not None and not self.stream:
            raise invalid("`stream_options` is only allowed with `stream`: true", "stream_options")
        if self.stream and self.prompt_logprobs:
            raise invalid("`prompt_logprobs` must be 0 when tokens are streamed", "prompt_logprobs")
        check_not_streamed(self, self.stream)
        if self.search_width is not None:
            self.check_width()
        elif self.best_of not in (None, 1, self.n):
            words = f"must be 1 or equal to `n`: all texts are returned. Given: {quoted(self.best_of)}"
            raise invalid(f"`best_of` {words}", "best_of")

    def check_width(self) -> None:
        """Raises ApiError for fields that contradict the width of a beam search."""
        if self.use_beam_search is False:
            raise invalid("`use_beam_search`: false and `beam_width` exclude each other", "use_beam_search")
        if self.best_of not in (None, self.search_width):
            words = f"must be equal to `beam_width` in a beam search. Given: {quoted(self.best_of)}"
            raise invalid(f"`best_of` {words}", "best_of")


class ChatRequest(OpenAIRequest):
    """The body of /v1/chat/completions."""

    messages: Listed[ChatMessage] = Field(description="The chat so far.", json_schema_extra={"minItems": 1})
    max_completion_tokens: Whole | None = least(1, "The newer name of `max_tokens`.")
    logprobs: bool | None = Field(
        default=None, description="Return each token with its log-probability. Default: false."
    )
    top_logprobs: Whole | None = least(
        0, "With `logprobs`: the number of most likely tokens to return at each position."
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="End the prompt with the beginning of a new assistant message. Default: true unless the "
        "last message is continued; false continues it, if it is the assistant's and calls no tools.",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="Continue the last message. Default: false; with CONTINUE_FINAL_MESSAGE true, if it is "
        "the assistant's and calls no tools.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None,
        description="Additional variables for the chat template, such as `enable_thinking`.",
    )

    tools: Listed[ToolSchema] | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: Chosen | None = Field(
        default=None,
        description="`auto` (the default): the model decides. `none`: no calls. `required`: one call at "
        'least. `{"type": "function", "function": {"name": …}}`: one call of this function. '
        '`{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": […]}}`: only these.',
        json_schema_extra=CHOSEN_SCHEMA,
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether there may be several calls. Default: true."
    )
    functions: Listed[FunctionSchema] | None = Field(
        default=None, description="OpenAI's older form of `tools`; the answer has a `function_call`."
    )
    function_call: Chosen | None = Field(
        default=None, description="OpenAI's older form of `tool_choice`.", json_schema_extra=CHOSEN_SCHEMA
    )
    tool_prompt: str | None = Field(
        default=None,
        description="TGI's text after the tools. Default, for a model whose template has no tools: "
        f"{TOOL_PROMPT}",
    )
    reasoning_effort: str | None = EFFORT
    include_reasoning: bool | None = Field(default=None, description="Return the reasoning. Default: true.")

    @property
    def rendering(self) -> Rendering:
        return replace(super().rendering, logprobs=bool(self.logprobs))


class CompletionRequest(OpenAIRequest):
    """The body of /v1/completions."""

    max_tokens: Whole | None = least(0, f"{MAX_TOKENS} With `echo`, 0 returns the prompt only.")

    prompt: Prompt = Field(
        description="A text, a list of texts, a list of token ids, or a list of such lists.",
        json_schema_extra={
            "minLength": 1,
            "minItems": 1,
            "items": {"minLength": 1, "minItems": 1, "minimum": 0, "items": {"minimum": 0}},
        },
    )
    logprobs: Whole | None = least(
        0,
        "Return each token with its log-probability, and this number of the most likely tokens at its "
        "position; with `echo`, also for the prompt.",
    )

    @property
    def shows_prompt_only(self) -> bool:
        """Whether the response is the prompt alone. One token is generated nevertheless: the prompt's
        log-probabilities arrive with it.
        """
        return bool(self.echo) and self.max_tokens == 0

    @property
    def rendering(self) -> Rendering:
        return replace(
            super().rendering, logprobs=self.logprobs is not None, prompt_only=self.shows_prompt_only
        )


OPENAI_FIELDS = frozenset(UNSUPPORTED).union(ChatRequest.model_fields, CompletionRequest.model_fields)
"""The fields that OpenAI's routes have, supported or not."""
