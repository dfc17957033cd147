"""Sampling defaults: values for requests of /v1 that say nothing, from a file or from a setting."""

import json
from collections.abc import Mapping
from typing import Any

from common.ranges import RANGES
from common.settings.types import SettingError

DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
"""Values of a generation_config.json that vLLM takes where a request says nothing."""
WHOLE = ("top_k", "max_new_tokens")


def read_overrides(text: str) -> dict[str, float]:
    """The values of OVERRIDE_GENERATION_CONFIG. Raises SettingError."""
    name = "override_generation_config"
    try:
        overrides = json.loads(text)
    except ValueError as error:
        raise SettingError(name, f"{text!r} is not JSON: {error}") from error
    if not isinstance(overrides, dict) or not overrides.keys() <= set(DEFAULTED):
        raise SettingError(name, f"{text} must be an object with some of {', '.join(DEFAULTED)}")
    return checked_defaults(overrides, name, "the object")


def checked_defaults(values: Mapping[str, Any], setting: str, where: str) -> dict[str, float]:
    """The values that are not null. Raises SettingError for one that is not in its range."""
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        number = isinstance(value, int if name in WHOLE else (int, float)) and not isinstance(value, bool)
        if not number or not RANGES[name].holds(value):
            kind = "a whole number" if name in WHOLE else "a number"
            raise SettingError(setting, f"{name} in {where} must be {kind}, {RANGES[name]}. Given: {value!r}")
    return given
