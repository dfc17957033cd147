"""Bodies of chats and completions: their fields, and the parameters, prompts and grammars that they ask for.

Fields of OpenAI and vLLM that this server does not support are refused by name; unknown names are ignored.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from api.answers.answer import HttpAnswer, Rendering
from api.errors import quoted, refuse
from api.grammar.compile import FIELDS, KINDS, RESPONSE_FORMATS, Grammar, read_grammar
from api.http.body import UnsupportedFields, reject_unsupported
from api.prompts.chat_template import Rendered
from api.protocols.protocol import Context
from api.requests.fields import (
    DETACHED,
    MAX_CHOICES,
    PENALTY,
    TEXTS_OR_IDS,
    BeamFields,
    Listed,
    ServedFields,
    StopText,
    Strict,
    Truncation,
    Whole,
    object_schema,
    optional,
    with_one_error,
)
from api.requests.validate import SWITCHES, GenerationParams, streamed_logits
from api.webhooks import WebhookField
from common.settings.ranges import least

Stop = Annotated[
    StopText | Listed[StopText],
    with_one_error("Input should be a string of 1 to 1000 characters, or a list of such strings"),
]
Prompt = Annotated[
    str | Listed[str] | Listed[Whole] | Listed[Listed[Whole]],
    with_one_error(
        "Input should be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    ),
]
FormatObject = Annotated[dict[str, Any], WithJsonSchema(object_schema(RESPONSE_FORMATS))]
JSON_OBJECT = {"required": ["json_object"], "properties": {"json_object": {"const": True}}}
ONE_OF_KINDS: Any = {"anyOf": [JSON_OBJECT, *({"required": [kind]} for kind in KINDS)]}
StructuredOutputs = Annotated[dict[str, Any], Field(json_schema_extra=ONE_OF_KINDS)]
MAX_TOKENS = "The most tokens to generate. Default: what is left of the model's context."
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

    max_tokens: int | None = least(1, MAX_TOKENS)
    min_tokens: int | None = least(
        0, "The fewest tokens to generate: before them only `max_tokens` ends the text."
    )
    stop: Stop | None = optional(
        "A stop string or several: the text ends before the first of them that appears."
    )
    include_stop_str_in_output: bool | None = optional(
        "Let the text include its stop string or stop token. Default: false."
    )
    skip_special_tokens: bool | None = optional("Leave special tokens out. Default: true.")
    add_special_tokens: bool | None = optional(
        "Add the special tokens that the tokenizer puts around a prompt. Default: true for "
        "completions; false for chats, whose template has them."
    )
    truncate_prompt_tokens: Truncation | None = optional(
        "The most tokens of the prompt to use: its last ones. -1: all that fit."
    )
    n: int | None = least(1, "The number of choices for each prompt. Default: 1.", MAX_CHOICES)
    best_of: Whole | None = optional(
        "Must be 1 or `n`, because all generated texts are returned. With `use_beam_search`: the "
        "number of sequences that are extended at once."
    )
    use_beam_search: bool | None = optional(
        "vLLM's form of `beam_width`: a beam search of width `best_of`, by default `n`. Default: "
        "true if `beam_width` is given."
    )
    frequency_penalty: float | None = optional(
        "Penalty for tokens by their number in the generated text, as OpenAI defines it.", **PENALTY
    )
    prompt_logprobs: int | None = least(
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

    response_format: FormatObject | None = optional(
        'What the text must look like: `{"type": "json_schema", "json_schema": {"schema": …}}`, '
        '`{"type": "json_object"}`, in vLLM\'s way `{"type": "structural_tag", "format": …}`, or in TGI\'s '
        '`{"type": "regex", "value": …}`.'
    )
    structured_outputs: StructuredOutputs | None = optional(
        "vLLM's form of `response_format`: an object with one of `json`, `regex`, `choice`, "
        "`grammar` (Lark or GBNF), `structural_tag` and `json_object`."
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

    def rendering(self, asked: Grammar | None, **own: Any) -> Rendering:
        """How the answer is rendered, whose text the client asks to look so."""
        options = self.stream_options
        return Rendering(
            usage=bool(options and options.include_usage),
            running_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            skip_special=self.skip_special_tokens is not False,
            include_stop=bool(self.include_stop_str_in_output),
            token_ids=bool(self.return_token_ids),
            names_by_id=bool(self.return_tokens_as_token_ids),
            prompt_tops=None if self.stream else self.prompt_logprobs,
            is_json=asked is not None and asked.kind == "json",
            **own,
        )

    def prompt_params(
        self, names: Mapping[str, str], defaults: Mapping[str, Any], **own: Any
    ) -> GenerationParams:
        """The parameters of a prompt: those that both routes have, and a route's `own`.

        Args:
            defaults: the model's. As in vLLM, its number of tokens is also the most that a request gets.
                Those that draw tokens are not for a beam search.
        """
        beams = self.beam_params(self.search_width, self.n)
        unused = {"max_new_tokens", *(SWITCHES if beams else ())}
        filled = {name: value for name, value in defaults.items() if name not in unused}
        params = self.generation_params(
            {**names, "beam_width": self.width_field},
            {"logprobs_mode": "raw_logprobs", **filled},
            do_sample=beams is None,
            n=1 if self.n is None or beams else self.n,
            beams=beams,
            **own,
        )
        given, most = params.stopping.max_new_tokens, defaults.get("max_new_tokens")
        most = min(given or most, most) if most else given
        return replace(params, stopping=replace(params.stopping, max_new_tokens=most))

    def check(self) -> None:
        """Raises ApiError for unsupported fields and contradictions."""
        reject_unsupported(self.model_extra or {}, UNSUPPORTED, openai_fields().union(TGI_FIELDS))
        width, all_texts = self.search_width, "1 or equal to `n`: all texts are returned"
        words = all_texts if width is None else "equal to `beam_width` in a beam search"
        refuse(
            (
                self.stream_options is not None and not self.stream,
                "`stream_options` is only allowed with `stream`: true",
            ),
            (self.stream and self.prompt_logprobs, "`prompt_logprobs` must be 0 when tokens are streamed"),
            *streamed_logits(self, self.stream),
            (
                width is not None and self.use_beam_search is False,
                "`use_beam_search`: false and `beam_width` exclude each other",
            ),
            (
                self.best_of not in ((None, 1, self.n) if width is None else (None, width)),
                f"`best_of` must be {words}. Given: {quoted(self.best_of)}",
            ),
        )


class CompletionRequest(OpenAIRequest):
    """The body of /v1/completions."""

    max_tokens: int | None = least(0, f"{MAX_TOKENS} With `echo`, 0 returns the prompt only.")

    prompt: Prompt = Field(
        description="A text, a list of texts, a list of token ids, or a list of such lists.",
        json_schema_extra=TEXTS_OR_IDS,
    )
    logprobs: int | None = least(
        0,
        "Return each token with its log-probability, and this number of the most likely tokens at its "
        "position; with `echo`, also for the prompt.",
    )

    def check(self) -> None:
        super().check()
        refuse(
            (self.max_tokens == 0 and not self.echo, "`max_tokens` must be at least 1. Given: 0"),
            (
                self.shows_prompt_only and self.search_width is not None,
                "`max_tokens` must be at least 1 in a beam search",
            ),
        )

    @property
    def shows_prompt_only(self) -> bool:
        """Whether the response is the prompt alone. One token is generated nevertheless: the prompt's
        log-probabilities arrive with it.
        """
        return bool(self.echo) and self.max_tokens == 0


@functools.cache
def openai_fields() -> frozenset[str]:
    """The fields that OpenAI's routes have, supported or not."""
    return frozenset(UNSUPPORTED).union(*(body.model_fields for body in OpenAIRequest.__subclasses__()))


# --- params -------------------------------------------------------------------------------------------------


NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_ids": "stop_token_ids",
    "num_returned": "n",
    "truncate": "truncate_prompt_tokens",
}
"""`GenerationParams` → the names of the fields of both routes, where they differ."""
PROMPT_NAMES = {**NAMES, "prompt_ids": "prompt", "top_n_tokens": "logprobs"}


# --- completions --------------------------------------------------------------------------------------------


def read_prompts(prompt: Any) -> list[str] | list[list[int]]:
    """The prompts of a body, each a text or token ids."""
    is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    return [prompt] if is_one else prompt


async def read_completion(body: CompletionRequest, context: Context) -> HttpAnswer:
    """What a body of /v1/completions asks for. Raises ApiError."""
    prompts = read_prompts(body.prompt)
    context.check_number(len(prompts), "prompt")
    asked, is_prompt_only = body.grammar(), body.shows_prompt_only
    rendering = body.rendering(asked, logprobs=body.logprobs is not None, prompt_only=is_prompt_only)
    tops = [rendering.prompt_tops, body.logprobs if body.echo else None]
    params = body.prompt_params(
        PROMPT_NAMES,
        context.pool.tokenizer.sampling_defaults,
        grammar=asked,
        rendering=rendering,
        prompt=None,
        prompt_ids=None,
        prompt_logprobs=max((number for number in tops if number is not None), default=None),
        prefix=None if body.echo else "",
    )
    if is_prompt_only:
        params = replace(params, stopping=replace(params.stopping, max_new_tokens=1))
    return await context.ask(
        [
            replace(params, **{"prompt": Rendered(one)} if isinstance(one, str) else {"prompt_ids": one})
            for one in prompts
        ]
    )
