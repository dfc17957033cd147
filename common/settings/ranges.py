"""Numbers in ranges, which pydantic checks and /docs shows: the sampling parameters that have defaults, in a
model's generation_config.json and in OVERRIDE_GENERATION_CONFIG; and settings that are JSON objects.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from common.settings.fields import SettingError, first_error

Model = TypeVar("Model", bound=BaseModel)


def to_whole(number: Any) -> Any:
    """A number without a fraction as an int, as in JSON Schema: 2.0 is 2. No text or truth value is one."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def least(value: int, description: str, most: int | None = None, default: Any = None) -> Any:
    """A field of a whole number from `value` to `most`, by default optional."""
    field = Field(default=default, description=description, ge=value, le=most)
    field.metadata.append(BeforeValidator(to_whole))
    return field


class SamplingDefaults(BaseModel):
    """Sampling parameters that vLLM takes of a generation_config.json where a request says nothing."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    temperature: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Default: 1. With 0, the most likely token is taken (greedy decoding).",
    )
    top_k: int | None = least(-1, "Sample from this many of the most likely tokens. 0 and -1 mean all.")
    top_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Sample from the most likely tokens whose probabilities add up to this.",
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Sample from tokens that are at least this likely relative to the most likely one.",
    )
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Penalty for tokens that the prompt or the text has already. 1 means none.",
    )


class Defaults(SamplingDefaults, extra="forbid"):
    """All values of a generation_config.json that count."""

    max_new_tokens: int | None = least(1, "The most tokens of an answer.")


def read_object(setting: str, given: str | Mapping[str, Any], kind: type[Model]) -> Model:
    """The object that a setting has, perhaps as JSON. Raises SettingError."""
    try:
        return kind.model_validate_json(given) if isinstance(given, str) else kind.model_validate(given)
    except ValidationError as errors:
        raise SettingError(setting, first_error(errors)) from errors


def read_defaults(setting: str, given: str | Mapping[str, Any]) -> dict[str, float]:
    """The values of `Defaults` in an object. Raises SettingError."""
    return read_object(setting, given, Defaults).model_dump(exclude_none=True)
