"""Bodies of chats and completions: their fields, and the parameters, prompts and grammars that they ask for.

Fields of OpenAI and vLLM that this server does not support are refused by name; unknown names are ignored.
"""

import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from api.answers.answer import Reading, Rendering
from api.answers.call_formats import HARMONY
from api.errors import ApiError, invalid, quoted, refuse, renamed
from api.event_loop import offload
from api.grammar.compile import Grammar
from api.grammar.read import FIELDS, read_grammar
from api.http.body import UnsupportedFields, reject_unsupported
from api.prompts.chat_template import Rendered
from api.prompts.tokenizer import ModelTokenizer
from api.protocols.protocol import Asked, Context
from api.requests.chat_prompt import (
    EFFORTS,
    TOOL_PROMPT,
    ChatMessage,
    FunctionSchema,
    ToolChoice,
    ToolSchema,
    answer_grammar,
    choose,
    join_parts,
    picture_sources,
    reading_beside,
    reasoning_variables,
    render_prompt,
    template_messages,
)
from api.requests.fields import (
    CHOICES,
    DETACHED,
    PENALTIES,
    STOP_SCHEMA,
    TEXTS_OR_IDS,
    TRUNCATION,
    BeamFields,
    Listed,
    ServedFields,
    Strict,
    Whole,
    least,
    optional,
    ranged,
    with_one_error,
)
from api.requests.pool import Pool
from api.requests.validate import SWITCHES, GenerationParams, check_generates, streamed_logits
from api.webhooks import WebhookField

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
EFFORT: Any = optional(
    "How much the model thinks first, if its template can say so; with `none` not at all.",
    {"enum": [*EFFORTS, None]},
)
UNSUPPORTED: UnsupportedFields = {
    **dict.fromkeys(("audio", "chat_template", "documents", "ec_transfer_params", "grammar"), ()),
    **dict.fromkeys(("kv_transfer_params", "logits_processors", "logprob_token_ids", "media_io_kwargs"), ()),
    **dict.fromkeys(("mm_processor_kwargs", "moderation", "prediction", "prompt_embeds", "request_id"), ()),
    **dict.fromkeys(("repetition_detection", "thinking_token_budget", "vllm_xargs"), ()),
    "modalities": (["text"],),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "suffix": ("",),
    "truncation_side": ("left",),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Fields that these routes refuse by name."""
TGI_FIELDS = (
    *("adapter_id", "decoder_input_details", "details", "do_sample", "max_new_tokens", "min_new_tokens"),
    *("return_full_text", "top_n_tokens", "truncate", "watermark"),
)
"""Parameters that only TGI's routes have."""


class StreamOptions(Strict):
    include_usage: bool | None = optional(
        "Send a last chunk that has no choices and the token counts in `usage`."
    )
    continuous_usage_stats: bool | None = optional(
        "With `include_usage`: send the token counts in every chunk."
    )


def guided_field(what: str) -> Any:
    """A field of older versions of vLLM."""
    schema: Any = {"minLength": 1, "minItems": 1, "items": {"minLength": 1}}
    return optional(f"vLLM's older form: {what}.", schema)


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
    stop: Stop | None = optional(
        "A stop string or several: the text ends before the first of them that appears.",
        {**STOP_SCHEMA, "items": STOP_SCHEMA},
    )
    include_stop_str_in_output: bool | None = optional(
        "Let the text include its stop string or stop token. Default: false."
    )
    skip_special_tokens: bool | None = optional("Leave special tokens out. Default: true.")
    add_special_tokens: bool | None = optional(
        "Add the special tokens that the tokenizer puts around a prompt. Default: true for "
        "completions; false for chats, whose template has them."
    )
    truncate_prompt_tokens: Whole | None = ranged(
        TRUNCATION, "The most tokens of the prompt to use: its last ones. -1: all that fit."
    )
    n: Whole | None = ranged(CHOICES, "The number of choices for each prompt. Default: 1.")
    best_of: Whole | None = optional(
        "Must be 1 or `n`, because all generated texts are returned. With `use_beam_search`: the "
        "number of sequences that are extended at once.",
        {"const": 1},
    )
    use_beam_search: bool | None = optional(
        "vLLM's form of `beam_width`: a beam search of width `best_of`, by default `n`. Default: "
        "true if `beam_width` is given.",
        {"enum": [False, None]},
    )
    frequency_penalty: float | None = ranged(
        PENALTIES, "Penalty for tokens by their number in the generated text, as OpenAI defines it."
    )
    prompt_logprobs: Whole | None = least(
        0,
        "Return the prompt's tokens with their log-probabilities, and this number of the most likely tokens "
        "at the position of each (vLLM). Not for streams.",
    )
    return_token_ids: bool | None = optional(
        "Return the ids of the prompt's and of the generated tokens (vLLM)."
    )
    return_tokens_as_token_ids: bool | None = optional(
        "With `logprobs`: name tokens as `token_id:7`, because some are only a part of a character (vLLM)."
    )
    echo: bool | None = optional(
        "Begin the text with the prompt; in a chat, with the assistant's message that is continued."
    )

    response_format: dict[str, Any] | None = optional(
        'What the text must look like: `{"type": "json_schema", "json_schema": {"schema": …}}`, '
        '`{"type": "json_object"}`, in vLLM\'s way `{"type": "structural_tag", "format": …}`, or in TGI\'s '
        '`{"type": "regex", "value": …}`.',
        FORMAT_SCHEMA,
    )
    structured_outputs: dict[str, Any] | None = optional(
        "vLLM's form of `response_format`: an object with one of `json`, `regex`, `choice`, "
        "`grammar` (Lark or GBNF), `structural_tag` and `json_object`.",
        {"required": ["json_object"], "properties": {"json_object": {"const": True}}},
    )
    guided_json: dict[str, Any] | str | None = guided_field("a JSON schema that the text satisfies")
    guided_regex: str | None = guided_field("a regex that the whole text matches")
    guided_choice: Listed[str] | None = guided_field("the text is one of these")
    guided_grammar: str | None = guided_field("a grammar (Lark or GBNF) that the text satisfies")
    guided_whitespace_pattern: str | None = optional(
        "vLLM's older form: a regex for the white space of JSON."
    )
    guided_decoding_backend: str | None = optional("Has no effect.")

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

    def check(self) -> None:
        """Raises ApiError for unsupported fields and contradictions."""
        super().check()
        reject_unsupported(self.model_extra or {}, UNSUPPORTED, OPENAI_FIELDS.union(TGI_FIELDS))
        width, all_texts = self.search_width, "1 or equal to `n`: all texts are returned"
        words = all_texts if width is None else "equal to `beam_width` in a beam search"
        refuse(
            (
                self.stream_options is not None and not self.stream,
                "`stream_options` is only allowed with `stream`: true",
                "stream_options",
            ),
            (
                self.stream and self.prompt_logprobs,
                "`prompt_logprobs` must be 0 when tokens are streamed",
                "prompt_logprobs",
            ),
            *streamed_logits(self, self.stream),
            (
                width is not None and self.use_beam_search is False,
                "`use_beam_search`: false and `beam_width` exclude each other",
                "use_beam_search",
            ),
            (
                self.best_of not in ((None, 1, self.n) if width is None else (None, width)),
                f"`best_of` must be {words}. Given: {quoted(self.best_of)}",
                "best_of",
            ),
        )


class ChatRequest(OpenAIRequest):
    """The body of /v1/chat/completions."""

    messages: Listed[ChatMessage] = Field(description="The chat so far.", json_schema_extra={"minItems": 1})
    max_completion_tokens: Whole | None = least(1, "The newer name of `max_tokens`.")
    logprobs: bool | None = optional("Return each token with its log-probability. Default: false.")
    top_logprobs: Whole | None = least(
        0, "With `logprobs`: the number of most likely tokens to return at each position."
    )
    add_generation_prompt: bool | None = optional(
        "End the prompt with the beginning of a new assistant message. Default: true unless the "
        "last message is continued; false continues it, if it is the assistant's and calls no tools."
    )
    continue_final_message: bool | None = optional(
        "Continue the last message. Default: false; with CONTINUE_FINAL_MESSAGE true, if it is "
        "the assistant's and calls no tools."
    )
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Additional variables for the chat template, such as `enable_thinking`."
    )

    tools: Listed[ToolSchema] | None = optional("Functions that the model may call.")
    tool_choice: Chosen | None = optional(
        "`auto` (the default): the model decides. `none`: no calls. `required`: one call at "
        'least. `{"type": "function", "function": {"name": …}}`: one call of this function. '
        '`{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": […]}}`: only these.',
        CHOSEN_SCHEMA,
    )
    parallel_tool_calls: bool | None = optional("Whether there may be several calls. Default: true.")
    functions: Listed[FunctionSchema] | None = optional(
        "OpenAI's older form of `tools`; the answer has a `function_call`."
    )
    function_call: Chosen | None = optional("OpenAI's older form of `tool_choice`.", CHOSEN_SCHEMA)
    tool_prompt: str | None = optional(
        f"TGI's text after the tools. Default, for a model whose template has no tools: {TOOL_PROMPT}"
    )
    reasoning_effort: str | None = EFFORT
    include_reasoning: bool | None = optional("Return the reasoning. Default: true.")


class CompletionRequest(OpenAIRequest):
    """The body of /v1/completions."""

    max_tokens: Whole | None = least(0, f"{MAX_TOKENS} With `echo`, 0 returns the prompt only.")

    prompt: Prompt = Field(
        description="A text, a list of texts, a list of token ids, or a list of such lists.",
        json_schema_extra=TEXTS_OR_IDS,
    )
    logprobs: Whole | None = least(
        0,
        "Return each token with its log-probability, and this number of the most likely tokens at its "
        "position; with `echo`, also for the prompt.",
    )

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise invalid("`max_tokens` must be at least 1. Given: 0", "max_tokens")

    @property
    def shows_prompt_only(self) -> bool:
        """Whether the response is the prompt alone. One token is generated nevertheless: the prompt's
        log-probabilities arrive with it.
        """
        return bool(self.echo) and self.max_tokens == 0


OPENAI_FIELDS = frozenset(UNSUPPORTED).union(ChatRequest.model_fields, CompletionRequest.model_fields)
"""The fields that OpenAI's routes have, supported or not."""


# --- params -------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_ids": "stop_token_ids",
    "num_returned": "n",
    "truncate": "truncate_prompt_tokens",
}
"""`GenerationParams` → the names of the fields of both routes, where they differ."""
CHAT_NAMES = {**NAMES, "prompt": "messages", "top_n_tokens": "top_logprobs"}
PROMPT_NAMES = {**NAMES, "prompt_ids": "prompt", "top_n_tokens": "logprobs"}
CHARS_OF_MESSAGE = 40
"""Rendering one message takes about as long as tokenizing this number of characters."""
PROMPT_END_CHARS = 200
"""The end of the prompt in which reasoning may have begun."""

TextsOrIds = list[str] | list[list[int]]


# --- chats --------------------------------------------------------------------------------------------------


async def read_chat(body: ChatRequest, pool: Pool, grammar: Grammar | None = None) -> GenerationParams:
    """The parameters of a chat. Raises ApiError.

    Args:
        grammar: what the text must look like, if fields of another API say so.
    """
    check_generates(pool.workers.limits)
    tools = tool_choice(body)
    reasons = pool.reasoning_format is not None or pool.call_format.name == HARMONY
    if body.reasoning_effort not in (None, "none") and not reasons:
        note_effort(pool.settings.model_name)
    continues = bool(body.messages) and continues_last_message(body, pool.settings.continue_final_message)
    size = CHARS_OF_MESSAGE * (len(body.messages) + (len(tools.tools) if tools else 0))
    prompt = await offload(size, lambda: render_chat(body, tools, continues, pool.tokenizer))
    reading = None if continues else new_reading(body, pool, tools, prompt.text[-PROMPT_END_CHARS:])
    params = from_chat(body, prompt, pool.tokenizer.sampling_defaults)
    may_force = tools is None or tools.is_promised or not pool.settings.disable_grammar_support
    asked = grammar or body.grammar()
    if reading is not None:
        reading = await reading_beside(asked, tools, reading)
    forced = await answer_grammar(asked, tools if may_force else None, reading, pool.tokenizer)
    logprobs, is_json = bool(body.logprobs), asked is not None and asked.kind == "json"
    rendering = replace(body.rendering, reading=reading, logprobs=logprobs, is_json=is_json)
    last, prefix = body.messages[-1], ""
    if body.echo and last.role == "assistant":  # the message that the model continues
        prefix = join_parts(last.content or "", "", may_refuse=True)
    return replace(params, grammar=forced, rendering=rendering, prefix=prefix)


async def read_other(
    chat: ChatRequest,
    pool: Pool,
    grammar: Grammar | None,
    fields: Mapping[str, str],
    names: Mapping[str, str],
) -> GenerationParams:
    """The parameters of a chat that was made of the body of another API. Raises ApiError.

    Args:
        grammar: what the text must look like.
        fields: patterns of fields of a chat → what they are called in that API.
        names: `GenerationParams` → the names of its fields, where they differ.
    """
    try:
        read = await read_chat(chat, pool, grammar)
    except ApiError as error:
        raise renamed(error, fields) from error
    pictures = [replace(one, field=names["prompt"]) for one in read.pictures]
    return replace(read, names=names, pictures=pictures)


@functools.cache
def note_effort(model: str) -> None:
    """Log, once for each model, that an effort has no effect: frameworks send one to every model."""
    log.warning("`reasoning_effort` has no effect: %s does not reason", model)


def tool_choice(body: ChatRequest) -> ToolChoice | None:
    """The tools that the answer may or must call; None for none. Raises ApiError."""
    older = [name for name in ("functions", "function_call") if getattr(body, name)]
    newer = [name for name in ("tools", "tool_choice") if getattr(body, name)]
    if older and newer:
        raise invalid(f"`{older[0]}` and `{newer[0]}` exclude each other", older[0])
    if not older:
        functions = [tool.function for tool in body.tools or []]
        found = choose(functions, body.tool_choice, "tools", "tool_choice")
        return found and replace(found, parallel=body.parallel_tool_calls is not False)
    choice = body.function_call
    if isinstance(choice, Mapping):
        choice = {"type": "function", "function": choice}
    elif choice not in (None, "none", "auto"):
        raise invalid("`function_call` must be none, auto, or an object with a `name`", "function_call")
    found = choose(body.functions or [], choice, "functions", "function_call")
    return found and replace(found, parallel=False, is_older=True)


def continues_last_message(body: ChatRequest, by_default: bool) -> bool:
    """Whether the model continues the last message. Raises ApiError for contradicting fields.

    Args:
        by_default: the answer if no field says it.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid(
            "`continue_final_message` and `add_generation_prompt` exclude each other",
            "continue_final_message",
        )
    if body.continue_final_message is not None:
        return body.continue_final_message
    last = body.messages[-1]
    continues = by_default if body.add_generation_prompt is None else not body.add_generation_prompt
    return continues and last.role == "assistant" and not last.has_calls


def render_chat(
    body: ChatRequest, tools: ToolChoice | None, continues: bool, tokenizer: ModelTokenizer
) -> Rendered:
    """The prompt of a chat. Raises ApiError."""
    if continues and tools is not None and tools.is_forced:
        raise invalid("`continue_final_message` and a forced `tool_choice` exclude each other", "tool_choice")
    template = tokenizer.chat_template
    return render_prompt(
        template_messages(body.messages, sees=tokenizer.pictures is not None),
        template,
        tokenizer.controls,
        tools=tools,
        tool_prompt=body.tool_prompt,
        variables=reasoning_variables(body.reasoning_effort, body.chat_template_kwargs or {}, template),
        add_generation_prompt=body.add_generation_prompt is not False,
        continues=continues,
    )


def new_reading(body: ChatRequest, pool: Pool, tools: ToolChoice | None, prompt_end: str) -> Reading | None:
    """How the answer is read; None if all of it is content."""
    calls = pool.call_format.name if tools or pool.call_format.name == HARMONY else ""
    reasoning = pool.reasoning_format.name if pool.reasoning_format else ""
    if not (calls or reasoning):
        return None
    return Reading(
        calls=calls,
        reasoning=reasoning,
        prompt_end=prompt_end,
        tools=[(one.name, json.dumps(one.parameters)) for one in tools.callable] if tools else [],
        is_named=bool(tools and tools.is_named),
        parallel=tools is None or tools.parallel,
        is_older=bool(tools and tools.is_older),
        shows_reasoning=body.include_reasoning is not False,
    )


def from_chat(body: ChatRequest, prompt: Rendered, defaults: Mapping[str, Any]) -> GenerationParams:
    """The parameters of a chat whose template rendered `prompt`. Raises ApiError."""
    most, newer = body.max_tokens, body.max_completion_tokens
    refuse(
        (
            None not in (most, newer) and most != newer,
            "`max_tokens` and `max_completion_tokens` differ: give one of them",
            "max_completion_tokens",
        ),
        (body.top_logprobs and not body.logprobs, "`top_logprobs` needs `logprobs`: true", "top_logprobs"),
    )
    return common_params(
        body,
        CHAT_NAMES if newer is None else CHAT_NAMES | {"max_new_tokens": "max_completion_tokens"},
        defaults,
        prompt=prompt,
        pictures=picture_sources(body.messages),
        add_special_tokens=bool(body.add_special_tokens),
        prompt_logprobs=body.rendering.prompt_tops,
    )


# --- completions --------------------------------------------------------------------------------------------


def read_prompts(prompt: Any) -> TextsOrIds:
    """The prompts of a body, each a text or token ids."""
    is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    found: TextsOrIds = [prompt] if is_one else prompt
    return found


def from_completion(
    body: CompletionRequest, prompts: TextsOrIds, defaults: Mapping[str, Any]
) -> list[GenerationParams]:
    """The parameters of each prompt. Raises ApiError."""
    if body.shows_prompt_only and body.search_width is not None:
        raise invalid("`max_tokens` must be at least 1 in a beam search", "max_tokens")
    tops, grammar = [body.rendering.prompt_tops, body.logprobs if body.echo else None], body.grammar()
    params = common_params(
        body,
        PROMPT_NAMES,
        defaults,
        prompt=None,
        prompt_ids=None,
        prompt_logprobs=max((number for number in tops if number is not None), default=None),
        grammar=grammar,
        rendering=replace(
            body.rendering,
            logprobs=body.logprobs is not None,
            prompt_only=body.shows_prompt_only,
            is_json=grammar is not None and grammar.kind == "json",
        ),
        prefix=None if body.echo else "",
    )
    if body.shows_prompt_only:
        params = replace(params, stopping=replace(params.stopping, max_new_tokens=1))
    return [
        replace(params, prompt=Rendered(prompt))
        if isinstance(prompt, str)
        else replace(params, prompt_ids=prompt)
        for prompt in prompts
    ]


# --- both ---------------------------------------------------------------------------------------------------


def common_params(
    body: OpenAIRequest, names: Mapping[str, str], defaults: Mapping[str, Any], **own: Any
) -> GenerationParams:
    """The parameters of both routes, and a route's `own`.

    Args:
        defaults: the model's. As in vLLM, its number of tokens is also the most that a request gets. Those
            that draw tokens are not for a beam search.
    """
    beams = body.beam_params(body.search_width, body.n)
    unused = {"max_new_tokens", *(SWITCHES if beams else ())}
    filled = {name: value for name, value in defaults.items() if name not in unused}
    n = 1 if body.n is None or beams else body.n
    params = body.generation_params(
        {**names, "beam_width": body.width_field},
        {"logprobs_mode": "raw_logprobs", **filled},
        do_sample=beams is None,
        n=n,
        beams=beams,
        **own,
    )
    given, most = params.stopping.max_new_tokens, defaults.get("max_new_tokens")
    most = min(given or most, most) if most else given
    return replace(params, stopping=replace(params.stopping, max_new_tokens=most))


async def read_completion(body: CompletionRequest, context: Context) -> Asked:
    """What a body of /v1/completions asks for. Raises ApiError."""
    prompts = read_prompts(body.prompt)
    context.check_number(len(prompts), "prompt")
    return await context.ask(from_completion(body, prompts, context.pool.tokenizer.sampling_defaults))


async def read_chat_completion(body: ChatRequest, context: Context) -> Asked:
    """What a body of /v1/chat/completions asks for. Raises ApiError."""
    return await context.ask([await read_chat(body, context.pool)])
