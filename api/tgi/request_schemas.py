"""Request bodies of TGI's routes. Parameters of TGI that this server does not support are refused by name,
and so are those that only OpenAI's routes have. Unknown names are ignored.
"""

from typing import Any

from pydantic import Field

from api.errors import invalid
from api.grammar.read import GRAMMAR_SCHEMA, read_tgi_grammar
from api.http.body import reject_unsupported
from api.openai.request_schemas import OPENAI_FIELDS
from api.requests.beams import BeamFields
from api.requests.fields import (
    BIAS_SCHEMA,
    DETACHED,
    LOGITS_DTYPE,
    RESUME_S,
    RETURN_CONTEXT_LOGITS,
    RETURN_GENERATION_LOGITS,
    Listed,
    LogitsDtype,
    Strict,
    Whole,
    ranged,
)
from api.requests.logits import check_not_streamed
from api.requests.params import SWITCH_NAMES, GenerationParams
from api.webhooks.field import WebhookField
from common.settings.ranges import MAX_STOP_CHARS

TGI_NAMES = {
    "text": "inputs",
    "stop_ids": "stop_token_ids",
    "relative_frequency_penalty": "frequency_penalty",
    "n": "best_of",
    "prompt_logprobs": "decoder_input_details",
}
"""`GenerationParams` → the names of TGI's parameters, where they differ."""


class GenerateParameters(BeamFields):
    """Generation parameters. Null and absent mean the default."""

    max_new_tokens: Whole | None = ranged(
        "max_new_tokens", "The most tokens to generate. Default: what is left of the model's context."
    )
    min_new_tokens: Whole | None = ranged(
        "min_new_tokens", "The fewest tokens to generate: before them only `max_new_tokens` ends the text."
    )
    stop: Listed[str] | None = Field(
        default=None,
        description="Stop strings: the text ends with the first of them that appears, and includes it.",
        json_schema_extra={"items": {"minLength": 1, "maxLength": MAX_STOP_CHARS}},
    )
    truncate: Whole | None = ranged("truncate", "The most tokens of the prompt to use: its last ones.")

    do_sample: bool | None = Field(
        default=None,
        description=f"Sample tokens. Default: true if any of {SWITCH_NAMES} has an effect; else the most "
        "likely token is taken.",
    )
    frequency_penalty: float | None = ranged(
        "relative_frequency_penalty",
        "Penalty for tokens in proportion to their share of prompt and text, as TGI defines it.",
    )
    logit_bias: dict[int, float] | None = Field(
        default=None,
        description="Numbers to add to the logits, by token id.",
        json_schema_extra=BIAS_SCHEMA,
    )

    best_of: Whole | None = Field(
        default=None,
        ge=0,
        json_schema_extra={"minimum": 0},
        description="The number of texts to generate; the one of highest mean log-probability is returned.",
    )
    details: bool | None = Field(
        default=None,
        description="Return the tokens with their log-probabilities, the seed and the finish reason.",
    )
    decoder_input_details: bool | None = Field(
        default=None,
        description="Return `details`, and in `prefill` the prompt's tokens with their log-probabilities. "
        "Not for streams.",
    )
    top_n_tokens: Whole | None = ranged(
        "top_n_tokens", "The number of most likely tokens to return at each position."
    )
    return_context_logits: bool | None = RETURN_CONTEXT_LOGITS
    return_generation_logits: bool | None = RETURN_GENERATION_LOGITS
    logits_dtype: LogitsDtype | None = LOGITS_DTYPE
    return_full_text: bool | None = Field(
        default=None, description="Begin the text with the prompt. Default: false; on `POST /`, true."
    )

    grammar: dict[str, Any] | None = Field(
        default=None,
        description='What the text must look like: `{"type": "json", "value": …}` with a JSON schema, or '
        '`{"type": "regex", "value": …}`.',
        json_schema_extra=GRAMMAR_SCHEMA,
    )

    watermark: bool | None = Field(
        default=None,
        description="Favour tokens that follow from those before them, so that the text can be recognised as "
        "generated (arXiv:2301.10226); WATERMARK_GAMMA and WATERMARK_DELTA say how much. Default: false.",
    )
    adapter_id: str | None = Field(
        default=None, description="The LoRA adapter to use: one that `GET /v1/models` lists."
    )

    @property
    def wants_details(self) -> bool:
        return bool(self.details or self.decoder_input_details)


class GenerateRequest(Strict):
    """The body of /generate and /generate_stream."""

    inputs: str = Field(description="The prompt.", json_schema_extra={"minLength": 1})
    parameters: GenerateParameters | None = None
    resume_s: float | None = RESUME_S
    detached: bool | None = DETACHED
    webhook: WebhookField | None = None

    @property
    def adapter_id(self) -> str | None:
        """The adapter that its parameters name."""
        return self.parameters.adapter_id if self.parameters else None

    def generation_params(self, streamed: bool) -> GenerationParams:
        """Convert the parameters. Raises ApiError (422) for unsupported ones and contradictions."""
        parameters = self.parameters or GenerateParameters()
        if parameters.decoder_input_details and streamed:
            raise invalid(
                "`decoder_input_details` must be false when tokens are streamed", "decoder_input_details"
            )
        check_not_streamed(parameters, streamed)
        reject_unsupported(
            parameters.model_extra or {},
            {},
            OPENAI_FIELDS,
        )
        return GenerationParams(
            text=self.inputs,
            has_inline_pictures=True,
            truncate=parameters.truncate,
            cache_salt=parameters.salt(),
            max_new_tokens=parameters.max_new_tokens,
            stopping=parameters.stopping_params(parameters.min_new_tokens, parameters.stop),
            do_sample=bool(parameters.do_sample),
            sampling=parameters.sampling_params(
                relative_frequency_penalty=parameters.frequency_penalty or 0.0,
                logit_bias=[*(parameters.logit_bias or {}).items()],
            ),
            seed=parameters.seed,
            bad_words=parameters.bad_words or [],
            grammar=read_tgi_grammar(parameters.grammar) if parameters.grammar else None,
            n=parameters.best_of or 1,
            beams=parameters.beam_params(parameters.beam_width),
            top_n_tokens=parameters.top_n_tokens or 0,
            watermark=bool(parameters.watermark),
            prompt_logprobs=0 if parameters.decoder_input_details else None,
            context_logits=bool(parameters.return_context_logits),
            generation_logits=bool(parameters.return_generation_logits),
            logits_dtype=parameters.logits_dtype,
            names=TGI_NAMES,
        )


class TokenizeRequest(Strict):
    """The body of /tokenize."""

    inputs: str = Field(description="The text to tokenize.")


class CompatGenerateRequest(GenerateRequest):
    """The body of POST /."""

    stream: bool | None = Field(default=None, description="Stream the tokens. Default: false.")
