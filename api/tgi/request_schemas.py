"""Shapes of the bodies of TGI's routes. Nothing is converted (`"5"` is no number).

Parameters that are not served are refused by name, and so are those that only OpenAI's routes have; names
that nobody knows are ignored.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from api.errors import invalid
from api.http.unsupported import UnsupportedFields, reject_unsupported
from api.inference.fields import Listed, ranged
from api.inference.params import GenerationParams
from api.inference.ranges import BIASES, MAX_STOP_CHARS
from api.openai.request_schemas import OPENAI_FIELDS

NAMES = {
    "text": "inputs",
    "stop_ids": "stop_token_ids",
    "relative_frequency_penalty": "frequency_penalty",
    "n": "best_of",
}
UNSUPPORTED: UnsupportedFields = {"watermark": (False,), "grammar": (), "adapter_id": ()}


def unsupported(name: str) -> Any:
    served: list[Any] = [None, *UNSUPPORTED[name]]
    return Field(default=None, description="not supported yet", json_schema_extra={"enum": served})


class GenerateParameters(BaseModel):
    """How to generate; a field that is null or absent has its default."""

    model_config = ConfigDict(strict=True, extra="allow")

    max_new_tokens: int | None = ranged("max_new_tokens", "default: what is left of the context")
    min_new_tokens: int | None = ranged(
        "min_new_tokens", "before it has so many, nothing but `max_new_tokens` ends an answer"
    )
    stop: Listed[str] | None = Field(
        default=None,
        description="the answer ends with the first of these, which is part of it",
        json_schema_extra={"items": {"minLength": 1, "maxLength": MAX_STOP_CHARS}},
    )
    stop_token_ids: Listed[int] | None = Field(
        default=None,
        description="ids that end the answer, with reason `stop_sequence`",
        json_schema_extra={"items": {"minimum": 0}},
    )
    ignore_eos: bool | None = Field(default=None, description="go on behind the end-of-sequence token")
    truncate: int | None = ranged("truncate", "the prompt's last so many tokens are used")

    do_sample: bool | None = Field(
        default=None,
        description="draw tokens; so does any of the next fields down to `typical_p`, where it changes something",
    )
    temperature: float | None = ranged("temperature", "default 1.0; 0 is greedy")
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
    seed: int | None = ranged("seed", "default: drawn by chance")
    repetition_penalty: float | None = ranged("repetition_penalty")
    frequency_penalty: float | None = ranged(
        "relative_frequency_penalty", "TGI's: times the share of a token in prompt and answer"
    )
    presence_penalty: float | None = ranged("presence_penalty", "OpenAI's")
    logit_bias: dict[int, float] | None = Field(
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

    best_of: int | None = Field(
        default=None, ge=0, description="the best of so many answers, by mean log-probability"
    )
    details: bool | None = None
    decoder_input_details: bool | None = Field(
        default=None,
        description="details, with the log-probabilities of the prompt's tokens; not where tokens are streamed",
    )
    top_n_tokens: int | None = ranged(
        "top_n_tokens", "so many of the likeliest tokens are told with each token"
    )
    return_full_text: bool | None = Field(
        default=None, description="prompt and answer together; on `/` this is the default"
    )

    watermark: bool | None = unsupported("watermark")
    grammar: dict[str, Any] | None = unsupported("grammar")
    adapter_id: str | None = unsupported("adapter_id")

    @property
    def wants_details(self) -> bool:
        return bool(self.details or self.decoder_input_details)


class GenerateRequest(BaseModel):
    """Body of /generate and /generate_stream."""

    model_config = ConfigDict(strict=True)

    inputs: str = Field(json_schema_extra={"minLength": 1})
    parameters: GenerateParameters | None = None

    def generation_params(self, streamed: bool) -> GenerationParams:
        """Raises ApiError (422) for what is not served, or not where tokens are streamed."""
        given = self.parameters or GenerateParameters()
        if given.decoder_input_details and streamed:
            raise invalid(
                "`decoder_input_details` must be false when tokens are streamed", "decoder_input_details"
            )
        reject_unsupported(
            {name: getattr(given, name) for name in UNSUPPORTED} | (given.model_extra or {}),
            UNSUPPORTED,
            OPENAI_FIELDS,
        )
        return GenerationParams(
            text=self.inputs,
            max_new_tokens=given.max_new_tokens,
            min_new_tokens=given.min_new_tokens or 0,
            stop=given.stop or [],
            stop_ids=given.stop_token_ids or [],
            ignore_eos=bool(given.ignore_eos),
            truncate=given.truncate,
            do_sample=given.do_sample,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            top_p_decay=given.top_p_decay,
            top_p_min=given.top_p_min,
            top_p_reset_ids=given.top_p_reset_ids or [],
            min_p=given.min_p,
            typical_p=given.typical_p,
            seed=given.seed,
            repetition_penalty=given.repetition_penalty,
            relative_frequency_penalty=given.frequency_penalty,
            presence_penalty=given.presence_penalty,
            logit_bias=given.logit_bias or {},
            bad_words=given.bad_words or [],
            n=given.best_of or 1,
            top_n_tokens=given.top_n_tokens or 0,
            prompt_logprobs=0 if given.decoder_input_details else None,
            names=NAMES,
        )


class TokenizeRequest(BaseModel):
    """Body of /tokenize."""

    model_config = ConfigDict(strict=True)

    inputs: str


class CompatGenerateRequest(GenerateRequest):
    """Body of POST /."""

    stream: bool | None = None
