"""Fields of request bodies: kinds of fields, and the parameters that TGI's and OpenAI's routes share.

The range of a number is what /docs shows and what `Strict.check` checks; `validate.py` checks the
fleet's limits.
"""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from api.errors import invalid, quoted
from api.requests.validate import BIASES, MAX_BEAM_WIDTH, MAX_STOP_CHARS, GenerationParams
from common.messages.request import SERVICE_CLASSES, BeamParams, SamplingParams, StoppingParams
from common.settings.ranges import RANGES, Range

Item = TypeVar("Item")
Part = TypeVar("Part", GenerationParams, SamplingParams, StoppingParams, BeamParams)

Listed = Annotated[list[Item], Field(fail_fast=True)]
"""A list; its error names the first wrong item only, because collecting a million errors takes seconds."""


def with_one_error(text: str) -> WrapValidator:
    """A validator for a field of several types: it gives one error in place of one for each type."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            raise PydanticCustomError("shape", text) from error

    return WrapValidator(check)


class WholeNumber:
    """A number without a fraction, as JSON Schema's `integer`: 2.0 is 2. No text or truth value is one."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        number = core_schema.float_schema(strict=True, allow_inf_nan=False)
        return core_schema.union_schema(
            [
                core_schema.int_schema(strict=True),
                core_schema.no_info_after_validator_function(to_whole, number),
            ],
            mode="left_to_right",
            custom_error_type="int_type",
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "integer"}


def to_whole(number: float) -> int:
    if not number.is_integer():
        raise ValueError
    return int(number)


Whole = Annotated[int, WholeNumber()]
TRUNCATION = Range(-1, hole=0)
"""Of `truncate_prompt_tokens`: -1 is as many tokens as fit."""
CHOICES, SHARES, PENALTIES = Range(1, 128), Range(0, 1, above=True), Range(-2, 2)
LENGTH_PENALTIES = Range(-5, 5)
"""With any length of a sequence, its score is then a number that float32 has."""
DIVERSITIES, SEEDS = Range(0, 100), Range(-(2**63), 2**64 - 1)
STOP_SCHEMA: dict[str, Any] = {"minLength": 1, "maxLength": MAX_STOP_CHARS}


class Strict(BaseModel):
    """A part of a request body. Types are not converted: `"5"` is not a number."""

    model_config = ConfigDict(strict=True)

    def check(self) -> None:
        """Raises ApiError for a number that is not in its range; in bodies that have more to check, also for
        unsupported fields, and for fields that contradict each other.
        """
        for name, allowed in ranges_of(type(self)):
            value = getattr(self, name)
            if value is not None and not allowed.holds(value):
                raise invalid(f"`{name}` must be {allowed}. Given: {quoted(value)}")


@cache
def ranges_of(body: type[BaseModel]) -> list[tuple[str, Range]]:
    """The fields of a body that are `ranged`."""
    fields = body.model_fields.items()
    return [(name, one) for name, field in fields for one in field.metadata if isinstance(one, Range)]


TEXTS_OR_IDS: Any = {
    "minLength": 1,
    "minItems": 1,
    "items": {"minLength": 1, "minItems": 1, "minimum": 0, "items": {"minimum": 0}},
}
"""JSON schema of prompts and inputs: texts, or lists of token ids."""
BIAS_SCHEMA: Any = {
    "propertyNames": {"pattern": "^[0-9]{1,6}$"},
    "additionalProperties": {"type": "number", **BIASES.schema},
}
"""JSON schema of `logit_bias`: token id → number."""


def optional(description: str, schema: Any = None) -> Any:
    """A field that may be left out; `schema` is what /docs says beside its type."""
    return Field(default=None, description=description, json_schema_extra=schema)


def ranged(allowed: str | Range, description: str, default: Any = None) -> Any:
    """A number in a range, or in that of its name in RANGES; `...` as its default makes it required."""
    found = RANGES[allowed] if isinstance(allowed, str) else allowed
    field = Field(default=default, description=description, json_schema_extra=found.schema)
    field.metadata.append(found)
    return field


def least(value: int, description: str) -> Any:
    """An optional whole number that is at least `value`."""
    return ranged(Range(value), description)


def token_ids(description: str) -> Any:
    """An optional list of token ids."""
    return optional(description, {"items": {"minimum": 0}})


MODEL: Any = optional(
    "A model that /v1/models lists. Default: this server's model; empty, `tgi` and `dummy` mean the same."
)
CACHE_SALT: Any = Field(
    default=None,
    min_length=1,
    description="Only requests with the same salt share what is computed of their prompts (vLLM).",
)
PRIORITY: Any = optional(
    "vLLM's: the lower, the sooner. Below 0 the class is `interactive`, with 0 `standard`, above 0 "
    "`batch`; these names are taken, too. The header `x-priority` comes before it.",
    {"anyOf": [{"type": "integer"}, {"enum": [*SERVICE_CLASSES, None]}]},
)
RESUMES_S = Range(0, 3600)
TIERS = {
    "auto": "standard",
    "default": "standard",
    "flex": "batch",
    "priority": "interactive",
    "scale": "interactive",
}
"""OpenAI's service tiers → classes."""
RESUME_S: Any = ranged(
    RESUMES_S,
    "With a stream: after its connection is lost, the request goes on for this many seconds, and "
    "`GET /requests/{id}/stream` continues it. Default: 0, and 30 if its gateway has died. The "
    "header `x-resume-seconds` means the same.",
)
DETACHED: Any = optional(
    "With a stream: the request goes on without a client, up to its deadline; "
    "`GET /requests/{id}/stream` has its answer for an hour. Default: false."
)

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


class SamplingFields(Strict, extra="allow"):
    """Sampling parameters that TGI's and OpenAI's routes share. Null and absent mean the default."""

    temperature: float | None = ranged(
        "temperature", "Default: 1. With 0, the most likely token is taken (greedy decoding)."
    )
    top_k: Whole | None = ranged(
        "top_k", "Sample from this many of the most likely tokens. 0 and -1 mean all."
    )
    top_p: float | None = ranged(
        "top_p", "Sample from the most likely tokens whose probabilities add up to this."
    )
    top_p_decay: float | None = ranged(SHARES, "Factor by which `top_p` is multiplied after each token.")
    top_p_min: float | None = ranged(
        "top_p", "The least that `top_p_decay` lowers `top_p` to. Default: 0.000001."
    )
    top_p_reset_ids: Listed[Whole] | None = token_ids(
        "Token ids after which a decayed `top_p` returns to its initial value."
    )
    min_p: float | None = ranged(
        "min_p", "Sample from tokens that are at least this likely relative to the most likely one."
    )
    typical_p: float | None = ranged(
        SHARES, "Locally typical sampling: the probability mass of the tokens that are kept."
    )
    seed: Whole | None = ranged(SEEDS, "Seed of the random numbers. Default: a random seed.")
    repetition_penalty: float | None = ranged(
        "repetition_penalty", "Penalty for tokens that the prompt or the text has already. 1 means none."
    )
    presence_penalty: float | None = ranged(
        PENALTIES, "Penalty for tokens that the generated text has already, as OpenAI defines it."
    )
    bad_words: Listed[str] | None = optional("Words that are never generated.", {"items": {"pattern": r"\S"}})
    stop_token_ids: Listed[Whole] | None = token_ids("Token ids that end the text.")
    allowed_token_ids: Listed[Whole] | None = Field(
        default=None,
        min_length=1,
        description="The only token ids that are generated (vLLM). Not beside a structured output.",
        json_schema_extra={"items": {"minimum": 0}},
    )
    ignore_eos: bool | None = optional("Continue after the end-of-sequence token. Default: false.")
    logprobs_mode: LogprobsMode | None = optional(
        "What the log-probabilities of generated tokens show (vLLM): those of the model itself "
        "(`raw_logprobs`), of what is sampled from (`processed_logprobs`: after penalties, temperature and "
        "truncation), or the logits in place of either. Default: LOGPROBS_MODE on /v1, else "
        "`processed_logprobs`."
    )
    cache_salt: str | None = CACHE_SALT

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema_of_fields: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema for /docs: a body's own fields come before the fields that routes share."""
        reference = handler(schema_of_fields)
        schema = handler.resolve_ref_schema(reference)
        names = dict.fromkeys(name for base in cls.__mro__ for name in inspect.get_annotations(base))
        schema["properties"] = {
            name: schema["properties"][name] for name in names if name in schema["properties"]
        }
        return reference


EarlyStopping = Annotated[
    bool | Literal["never"] | Whole, with_one_error('Input should be true, false, "never" or a whole number')
]
NEVER = 2
"""`BeamParams.early_stopping` for transformers' "never", and for TensorRT-LLM's numbers from 2 on."""
WITHOUT_SEARCH = {"length_penalty": 1.0, "early_stopping": 0, "diversity": 0.0}
"""Fields that mean nothing without a beam search → the value that is accepted all the same."""


NO_DEFAULTS = {"temperature": 1.0, "logprobs_mode": "processed_logprobs"}


class BeamFields(SamplingFields):
    """Sampling parameters, those of a beam search, and which logits are returned."""

    beam_width: Whole | None = ranged(
        Range(1, MAX_BEAM_WIDTH),
        "Search for the likeliest sequences, this many at once, in place of sampling.",
    )
    length_penalty: float | None = ranged(
        LENGTH_PENALTIES,
        "Of a beam search: the sum of a sequence's log-probabilities is divided by its length to "
        "this power. Default: 1.",
    )
    early_stopping: EarlyStopping | None = optional(
        "Of a beam search: end it with the first `beam_width` sequences that have ended (true, "
        'TensorRT-LLM\'s 1), when no better one is likely (false, 0), or when none is possible ("never", 2). '
        "Default: false.",
        {"enum": [True, False, "never", 0, 1, 2, None]},
    )
    diversity: float | None = ranged(
        DIVERSITIES, "Of a beam search: TensorRT-LLM's `beam_search_diversity_rate`. Default: 0."
    )
    beam_search_diversity_rate: float | None = ranged(DIVERSITIES, "The same as `diversity`.")

    logit_bias: dict[int, float] | None = optional("Numbers to add to the logits, by token id.", BIAS_SCHEMA)
    return_context_logits: bool | None = optional(
        "Return the model's logits at each token of the prompt (TensorRT-LLM): in JSON as base64, with their "
        "shape and dtype. Not for streams. Default: false."
    )
    return_generation_logits: bool | None = optional(
        "Return the logits that each generated token was chosen from, before penalties and temperature "
        "(TensorRT-LLM); as `return_context_logits` does. Default: false."
    )
    logits_dtype: Literal["float32", "model"] | None = optional(
        "`float32` (the default), or `model`: the dtype in which the model computes."
    )

    def part(self, kind: type[Part], names: Mapping[str, str], /, **own: Any) -> Part:
        """The parameters of this kind that are given, and those that are made of fields in a way of their
        `own`.

        Args:
            names: parameters → the fields that have them, where these are called otherwise.
        """
        places = {one: names.get(one, one) for one in kind.__dataclass_fields__ if one not in own}
        known = type(self).model_fields
        given = {one: getattr(self, place) for one, place in places.items() if place in known}
        return kind(**{one: value for one, value in given.items() if value is not None}, **own)

    def generation_params(
        self, names: Mapping[str, str], defaults: Mapping[str, Any] = NO_DEFAULTS, **own: Any
    ) -> GenerationParams:
        """The parameters of a prompt: those that are given, or else `defaults`, and its `own`."""
        stop = getattr(self, names.get("stop", "stop"))
        filled = {
            one: value for one, value in {**NO_DEFAULTS, **defaults}.items() if getattr(self, one) is None
        }
        mode = str(filled.pop("logprobs_mode", self.logprobs_mode))
        sampling = self.part(
            SamplingParams,
            names,
            seed=0,
            bad_words=[],
            grammar="",
            logit_bias=[*(self.logit_bias or {}).items()],
            raw_logprobs=mode.startswith("raw"),
            report_logits=mode.endswith("logits"),
            **filled,
        )
        stopping = self.part(StoppingParams, names, stop=[stop] if isinstance(stop, str) else stop or [])
        return self.part(GenerationParams, names, stopping=stopping, sampling=sampling, names=names, **own)

    def beam_params(self, width: int | None, num_returned: int | None = None) -> BeamParams | None:
        """How a beam search of this width is done; None for no beam search. Raises ApiError (422).

        Args:
            num_returned: sequences that are returned; by default all.
        """
        if None not in (self.diversity, self.beam_search_diversity_rate):
            raise invalid(
                "`diversity` and `beam_search_diversity_rate` exclude each other",
                "beam_search_diversity_rate",
            )
        given = {
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping and stopping_number(self.early_stopping),
            "diversity": self.diversity,
            "beam_search_diversity_rate": self.beam_search_diversity_rate,
        }
        if width is None:
            for name, value in given.items():
                if value is not None and value != WITHOUT_SEARCH.get(name, 0.0):
                    raise invalid(f"`{name}` needs a beam search: set `beam_width`")
            return None
        return self.part(
            BeamParams,
            {},
            width=width,
            early_stopping=stopping_number(self.early_stopping),
            diversity=self.diversity or self.beam_search_diversity_rate or 0.0,
            num_returned=width if num_returned is None else num_returned,
        )


def stopping_number(early_stopping: bool | str | int | None) -> int:
    """`early_stopping` as `BeamParams` has it."""
    return NEVER if early_stopping == "never" else min(int(early_stopping or 0), NEVER)


class ServedFields(SamplingFields):
    """Fields of all routes of OpenAI's API that generate: the model, and how it is served."""

    model: str | None = MODEL
    stream: bool | None = optional("Send server-sent events. Default: false.")
    resume_s: float | None = RESUME_S
    priority: Whole | str | None = PRIORITY
    service_tier: str | None = optional(
        "OpenAI's: `flex` is the class `batch`, `priority` and `scale` are `interactive`, "
        "`default` and `auto` are `standard`. `priority` comes before it.",
        {"enum": [*TIERS, None]},
    )

    @property
    def tier(self) -> str | None:
        """The service tier by OpenAI's name. Raises ApiError."""
        return self.service_tier
