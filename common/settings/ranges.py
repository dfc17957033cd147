"""Ranges of numbers: of the parameters of /v1 that have defaults, in a model's generation_config.json and in
OVERRIDE_GENERATION_CONFIG, and of the numbers in settings that are JSON objects.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.settings.types import SettingError


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


def read_overrides(text: str) -> dict[str, float]:
    """The values of OVERRIDE_GENERATION_CONFIG. Raises SettingError."""
    name = "override_generation_config"
    return checked_defaults(read_object(name, text, [*RANGES]), name, "the object")


def read_object(setting: str, text: str, known: Sequence[str]) -> dict[str, Any]:
    """The values that are not null of a setting that is a JSON object. Raises SettingError."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise SettingError(setting, f"{text!r} is not JSON: {error}") from error
    if not isinstance(given, dict) or not given.keys() <= {*known}:
        raise SettingError(setting, f"{text} must be an object with some of {', '.join(known)}")
    return {name: value for name, value in given.items() if value is not None}


def checked_defaults(values: Mapping[str, Any], setting: str, where: str) -> dict[str, float]:
    """The values that are not null. Raises SettingError for one that is not in its range."""
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        check_number(setting, f"{name} in {where}", value, RANGES[name])
    return given


def check_number(setting: str, name: str, value: Any, limits: Range) -> None:
    """Raises SettingError for a value that is no number, or not in its range."""
    is_number = isinstance(value, int if limits.is_whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not limits.holds(value):
        kind = "a whole number" if limits.is_whole else "a number"
        raise SettingError(setting, f"{name} must be {kind}, {limits}. Given: {value!r}")
