"""Request bodies of OpenAI's routes, with the additions of vLLM and TGI."""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from api.chat.messages import ChatMessage
from api.chat.prompt import EFFORTS, TOOL_PROMPT
from api.chat.tools import FunctionSchema, ToolSchema
from api.inference.fields import Listed, Whole, least, with_one_error
from api.openai.shared_fields import OpenAIRequest, openai_fields
from common.messages.answer import Rendering

Prompt = Annotated[
    str | Listed[str] | Listed[Whole] | Listed[Listed[Whole]],
    with_one_error(
        "Input should be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    ),
]

Chosen = Annotated[str | dict[str, Any], with_one_error("Input should be a string or an object")]
CHOICES: Any = {"enum": ["none", "auto", None]}
"""What of a `tool_choice` is proposed."""


class ChatRequest(OpenAIRequest):
    """The body of /v1/chat/completions."""

    messages: Listed[ChatMessage] = Field(description="The chat so far.", json_schema_extra={"minItems": 1})
    max_completion_tokens: Whole | None = least(1, "The newer name of `max_tokens`.")
    logprobs: bool | None = Field(
        default=None, description="Return each token with its log-probability. Default: false."
    )
    top_logprobs: Whole | None = least(
        0, "With `logprobs`: return so many of the most likely tokens at each position."
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
        description="Additional variables for the chat template, as `enable_thinking`.",
    )

    tools: Listed[ToolSchema] | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: Chosen | None = Field(
        default=None,
        description="`auto` (the default): the model decides. `none`: no calls. `required`: one call at "
        'least. `{"type": "function", "function": {"name": …}}`: one call of this function. '
        '`{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": […]}}`: only these.',
        json_schema_extra=CHOICES,
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether there may be several calls. Default: true."
    )
    functions: Listed[FunctionSchema] | None = Field(
        default=None, description="OpenAI's older form of `tools`; the answer has a `function_call`."
    )
    function_call: Chosen | None = Field(
        default=None, description="OpenAI's older form of `tool_choice`.", json_schema_extra=CHOICES
    )
    tool_prompt: str | None = Field(
        default=None,
        description="TGI's text behind the tools. Default, for a model whose template has no tools: "
        f"{TOOL_PROMPT}",
    )
    reasoning_effort: str | None = Field(
        default=None,
        description="How much the model thinks first, where its template can say so; with `none` not at all.",
        json_schema_extra={"enum": [*EFFORTS, None]},
    )
    include_reasoning: bool | None = Field(default=None, description="Return the reasoning. Default: true.")

    @property
    def rendering(self) -> Rendering:
        return replace(super().rendering, logprobs=bool(self.logprobs))


class CompletionRequest(OpenAIRequest):
    """The body of /v1/completions."""

    max_tokens: Whole | None = least(
        0,
        "The most tokens to generate. Default: what is left of the model's context. With `echo`, 0 returns "
        "the prompt only.",
    )

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
        "Return each token with its log-probability, and so many of the most likely tokens at its position; "
        "with `echo`, also for the prompt.",
    )

    @property
    def shows_prompt_only(self) -> bool:
        """Whether the response is the prompt alone. One token is generated all the same, because the prompt's
        log-probabilities arrive with it.
        """
        return bool(self.echo) and self.max_tokens == 0

    @property
    def rendering(self) -> Rendering:
        return replace(
            super().rendering, logprobs=self.logprobs is not None, prompt_only=self.shows_prompt_only
        )


OPENAI_FIELDS = openai_fields()
