"""Ranges of numbers: of the parameters of /v1 that have defaults, in a model's generation_config.json and in
OVERRIDE_GENERATION_CONFIG, and of the numbers in settings that are JSON objects.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from common.settings.fields import SettingError, first_error


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` (with `above`: greater than `least`) to `most`, or without an upper bound, but not
    `hole`; `is_whole`: whole ones, where more than the range itself is checked.
    """

    least: float
    most: float | None = None
    above: bool = False
    is_whole: bool = False
    hole: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a value lies in the range; NaN lies in none."""
        enough = value > self.least if self.above else value >= self.least
        return enough and value != self.hole and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        low = f"{'above' if self.above else 'at least'} {self.least}"
        most = "" if self.most is None else f" and at most {self.most}"
        return f"{low}{most}{'' if self.hole is None else f' and not {self.hole}'}"

    @property
    def schema(self) -> dict[str, Any]:
        """The range as JSON Schema; its bounds do not concern null."""
        low = {"exclusiveMinimum" if self.above else "minimum": self.least}
        most = {} if self.most is None else {"maximum": self.most}
        return low | most | ({} if self.hole is None else {"not": {"const": self.hole}})


RANGES = {
    "temperature": Range(0, 100),
    "top_k": Range(-1, is_whole=True),
    "top_p": Range(0, 1),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, above=True),
    "max_new_tokens": Range(1, is_whole=True),
}
"""Of the values of a generation_config.json that vLLM takes where a request says nothing."""


def to_type(limits: Range) -> Any:
    """The range as a type of pydantic's."""
    low: Any = {"gt" if limits.above else "ge": limits.least}
    kind: Any = int if limits.is_whole else float
    return Annotated[kind, Field(**low, le=limits.most, allow_inf_nan=False)] | None


FIELDS: Any = {name: (to_type(limits), None) for name, limits in RANGES.items()}
DEFAULTS: Any = create_model("Defaults", __config__=ConfigDict(extra="forbid", strict=True), **FIELDS)
Model = TypeVar("Model", bound=BaseModel)


def read_object(setting: str, given: str | Mapping[str, Any], kind: type[Model]) -> Model:
    """The object that a setting has, perhaps as JSON. Raises SettingError."""
    try:
        return kind.model_validate_json(given) if isinstance(given, str) else kind.model_validate(given)
    except ValidationError as errors:
        raise SettingError(setting, first_error(errors)) from errors


def read_defaults(setting: str, given: str | Mapping[str, Any]) -> dict[str, float]:
    """The values of RANGES in an object. Raises SettingError."""
    found: BaseModel = read_object(setting, given, DEFAULTS)
    return found.model_dump(exclude_none=True)
