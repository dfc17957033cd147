"""Fields of request bodies: kinds of fields, and the parameters that TGI's and OpenAI's routes share.

What /docs shows of a field is what pydantic checks; `validate.py` checks the fleet's limits.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError, core_schema

from api.errors import invalid
from api.requests.validate import MAX_BEAM_WIDTH, GenerationParams
from common.messages.request import SERVICE_CLASSES, BeamParams, SamplingParams, StoppingParams
from common.settings.ranges import SamplingDefaults, least, to_whole

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


INTEGER = core_schema.union_schema(
    [
        core_schema.int_schema(strict=True),
        core_schema.no_info_before_validator_function(to_whole, core_schema.int_schema(strict=True)),
    ],
    mode="left_to_right",
    custom_error_type="int_type",
)
Whole = Annotated[int, GetPydanticSchema(lambda *_: INTEGER), WithJsonSchema({"type": "integer"})]
"""A number without a fraction, as JSON Schema's `integer`, in a list: most are ints, which cost least."""


def check_truncation(number: int) -> int:
    if number == 0:
        raise ValueError("no token would be left")
    return number


Truncation = Annotated[
    int,
    Field(ge=-1, json_schema_extra={"not": {"const": 0}}),
    BeforeValidator(to_whole),
    AfterValidator(check_truncation),
]
"""Of `truncate_prompt_tokens`: -1 is as many tokens as fit."""
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
BadWord = Annotated[str, Field(max_length=200, pattern=r"\S")]
BiasedToken = Annotated[int, Field(strict=False)]  # a key of JSON is a text
Bias = Annotated[float, Field(ge=-100, le=100)]
Labels = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
"""Of `metadata`: as many and as long as OpenAI accepts."""
MAX_CHOICES, MAX_LISTED_IDS = 128, 128
SHARE: Any = {"gt": 0, "le": 1}
PENALTY: Any = {"ge": -2, "le": 2}
SEED = (-(2**63), 2**64 - 1)


class Strict(BaseModel):
    """A part of a request body. Types are not converted: `"5"` is not a number."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    def check(self) -> None:
        """Raises ApiError, in bodies that have more to check than their fields, for unsupported ones, and for
        those that contradict each other.
        """


TEXTS_OR_IDS: Any = {
    "minLength": 1,
    "minItems": 1,
    "items": {"minLength": 1, "minItems": 1, "minimum": 0, "items": {"minimum": 0}},
}
"""JSON schema of prompts and inputs: texts, or lists of token ids."""


def optional(description: str, schema: Any = None, **limits: Any) -> Any:
    """A field that may be left out; `schema` is what /docs says beside its type and its limits."""
    return Field(default=None, description=description, json_schema_extra=schema, **limits)


def object_schema(types: Sequence[str | None], *needed: str, **fields: Any) -> dict[str, Any]:
    """The JSON schema of an object of one of these types, which is left out where it may be null, and of its
    fields, of which it needs some.
    """
    required = [*([] if None in types else ["type"]), *needed]
    return {"type": "object", "required": required, "properties": {"type": {"enum": [*types]}, **fields}}


def token_ids(description: str, **limits: Any) -> Any:
    """An optional list of token ids."""
    return optional(description, {"items": {"minimum": 0}}, **limits)


MODEL: Any = optional(
    "A model that /v1/models lists. Default: this server's model; empty, `tgi` and `dummy` mean the same."
)
CACHE_SALT: Any = Field(
    default=None,
    min_length=1,
    description="Only requests with the same salt share what is computed of their prompts (vLLM).",
)
ClassName = Annotated[str, Field(pattern=f"^({'|'.join(SERVICE_CLASSES)})$")]
NO_CLASS = with_one_error(
    f"Input should be one of {', '.join(SERVICE_CLASSES)}, or a whole number (the lower, the sooner)"
)
Priority = Annotated[Whole | ClassName, NO_CLASS]
PRIORITY: Any = optional(
    "vLLM's: the lower, the sooner. Below 0 the class is `interactive`, with 0 `standard`, above 0 "
    "`batch`; these names are taken, too. The header `x-priority` comes before it."
)
TIERS = {
    "auto": "standard",
    "default": "standard",
    "standard_only": "standard",
    "flex": "batch",
    "priority": "interactive",
    "scale": "interactive",
}
"""OpenAI's and Anthropic's service tiers → classes."""
RESUMES: Any = {"ge": 0, "le": 3600, "allow_inf_nan": False}
RESUME_S: Any = optional(
    "With a stream: after its connection is lost, the request goes on for this many seconds, and "
    "`GET /requests/{id}/stream` continues it. Default: 0, and 30 if its gateway has died. The "
    "header `x-resume-seconds` means the same.",
    **RESUMES,
)
DETACHED: Any = optional(
    "With a stream: the request goes on without a client, up to its deadline; "
    "`GET /requests/{id}/stream` has its answer for an hour. Default: false."
)

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


class SamplingFields(SamplingDefaults, Strict, extra="allow"):
    """Sampling parameters that TGI's and OpenAI's routes share. Null and absent mean the default."""

    top_p_decay: float | None = optional("Factor by which `top_p` is multiplied after each token.", **SHARE)
    top_p_min: float | None = optional(
        "The least that `top_p_decay` lowers `top_p` to. Default: 0.000001.", ge=0, le=1
    )
    top_p_reset_ids: Listed[Whole] | None = token_ids(
        "Token ids after which a decayed `top_p` returns to its initial value.", max_length=MAX_LISTED_IDS
    )
    typical_p: float | None = optional(
        "Locally typical sampling: the probability mass of the tokens that are kept.", **SHARE
    )
    seed: int | None = least(SEED[0], "Seed of the random numbers. Default: a random seed.", SEED[1])
    presence_penalty: float | None = optional(
        "Penalty for tokens that the generated text has already, as OpenAI defines it.", **PENALTY
    )
    bad_words: Listed[BadWord] | None = optional("Words that are never generated.", max_length=128)
    stop_token_ids: Listed[Whole] | None = token_ids(
        "Token ids that end the text.", max_length=MAX_LISTED_IDS
    )
    allowed_token_ids: Listed[Whole] | None = token_ids(
        "The only token ids that are generated (vLLM). Not beside a structured output.", min_length=1
    )
    ignore_eos: bool | None = optional("Continue after the end-of-sequence token. Default: false.")
    logprobs_mode: LogprobsMode | None = optional(
        "What the log-probabilities of generated tokens show (vLLM): those of the model itself "
        "(`raw_logprobs`), of what is sampled from (`processed_logprobs`: after penalties, temperature and "
        "truncation), or the logits in place of either. Default: LOGPROBS_MODE on /v1, else "
        "`processed_logprobs`."
    )
    cache_salt: str | None = CACHE_SALT


def stopping_number(early_stopping: bool | str | int) -> int:
    """As `BeamParams` has it: 2 for transformers' "never", and for TensorRT-LLM's numbers from 2 on."""
    return 2 if early_stopping == "never" else min(int(early_stopping), 2)


EarlyStopping = Annotated[
    bool | Literal["never"] | Whole,
    with_one_error('Input should be true, false, "never" or a whole number'),
    AfterValidator(stopping_number),
]
NO_SEARCH = BeamParams(1)
NO_DEFAULTS = {"temperature": 1.0, "logprobs_mode": "processed_logprobs"}


class BeamFields(SamplingFields):
    """Sampling parameters, those of a beam search, and which logits are returned."""

    beam_width: int | None = least(
        1, "Search for the likeliest sequences, this many at once, in place of sampling.", MAX_BEAM_WIDTH
    )
    length_penalty: float | None = optional(  # within it a score is a number that float32 has
        "Of a beam search: the sum of a sequence's log-probabilities is divided by its length to "
        "this power. Default: 1.",
        ge=-5,
        le=5,
    )
    early_stopping: EarlyStopping | None = optional(
        "Of a beam search: end it with the first `beam_width` sequences that have ended (true, "
        'TensorRT-LLM\'s 1), when no better one is likely (false, 0), or when none is possible ("never", 2). '
        "Default: false."
    )
    diversity: float | None = optional(
        "Of a beam search: TensorRT-LLM's `beam_search_diversity_rate`, by this name, too. Default: 0.",
        validation_alias=AliasChoices("diversity", "beam_search_diversity_rate"),
        ge=0,
        le=100,
    )

    logit_bias: dict[BiasedToken, Bias] | None = optional(
        "Numbers to add to the logits, by token id.",
        {"propertyNames": {"pattern": "^[0-9]{1,6}$"}},
        max_length=1024,
    )
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
        found = self.part(BeamParams, {}, width=width or 1, num_returned=num_returned or width or 1)
        if width is not None:
            return found
        for name in ("length_penalty", "early_stopping", "diversity"):
            if getattr(found, name) != getattr(NO_SEARCH, name):
                raise invalid(f"`{name}` needs a beam search: set `beam_width`")
        return None


class ServedFields(SamplingFields):
    """Fields of all routes of OpenAI's API that generate: the model, and how it is served."""

    model: str | None = MODEL
    stream: bool | None = optional("Send server-sent events. Default: false.")
    resume_s: float | None = RESUME_S
    priority: Priority | None = PRIORITY
    service_tier: str | None = optional(
        "OpenAI's: `flex` is the class `batch`, `priority` and `scale` are `interactive`, "
        "`default`, `auto` and Anthropic's `standard_only` are `standard`. `priority` comes before it.",
        pattern=f"^({'|'.join(TIERS)})$",
    )
