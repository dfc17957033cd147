"""One setting: what it may be, and the value that a text gives it."""

import contextlib
import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

WEEK_S = 7 * 86_400
MAX_NUMBER = 2**53
"""Scripts count in doubles, which are exact up to here."""
SIZES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


class SettingError(Exception):
    """A setting that cannot be served. `str()` is the one line a person sees: it names the setting and the
    cause.
    """

    def __init__(self, name: str, cause: str) -> None:
        self.name, self.cause = name, cause
        super().__init__(f"{name if name.startswith('-') else name.upper()}: {cause}")


@contextlib.contextmanager
def exit_when_unservable() -> Iterator[None]:
    """A SettingError inside ends this process with one line and EX_CONFIG (78), which tells the launcher that
    it was a setting.
    """
    try:
        yield
    except SettingError as error:
        print(f"tokenfleet: {error}", file=sys.stderr, flush=True)
        sys.exit(os.EX_CONFIG)


def setting(
    default: Any,
    help: str,
    unit: str = "",
    choices: tuple[str, ...] = (),
    respell: Callable[[str], str] = str.lower,
    at_least: float = 0,
    at_most: int = MAX_NUMBER,
) -> Any:
    """A field of Settings. `at_least` and `at_most` bound numbers, where these are read: a default stands for
    itself. `respell` turns what others call one of the choices into ours.
    """
    metadata = {
        "help": help,
        "unit": unit,
        "choices": choices,
        "respell": respell,
        "at_least": at_least,
        "at_most": at_most,
    }
    return field(default=default, metadata=metadata)


def seconds(default: float, help: str, at_least: float = 0) -> Any:
    return setting(default, help, "s", at_least=at_least, at_most=WEEK_S)


def parse(item: dataclasses.Field[Any], kind: Any, text: str, name: str) -> Any:
    """The value of type `kind` that `text` gives to a field of Settings. Raises SettingError of `name`, which
    is what the person said.
    """
    value = convert(kind, text, name)
    choices = item.metadata["choices"]
    if choices:
        value = item.metadata["respell"](value)
        if value not in choices:
            raise SettingError(name, f"{text!r} is not one of {', '.join(choices)}")
    if kind in (int, float):
        check_range(item, name, text, value)
    return value


def convert(kind: Any, text: str, name: str) -> Any:
    try:
        return CONVERT[kind](text.strip())
    except (ValueError, OverflowError) as error:
        raise SettingError(name, f"{text!r} is not {NAMES[kind]}") from error


def check_range(item: dataclasses.Field[Any], name: str, text: str, value: float) -> None:
    least, most = item.metadata["at_least"], item.metadata["at_most"]
    if value < least:
        raise SettingError(name, f"{text} is less than {least}")
    if value > most:
        raise SettingError(name, f"{text} is more than {most}")


def to_int(text: str) -> int:
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([a-z]*)", text.lower().replace("_", ""))
    if match is None or match[2] not in SIZES:
        raise ValueError(text)
    number = float(match[1]) * SIZES[match[2]] if "." in match[1] else int(match[1]) * SIZES[match[2]]
    if number != int(number):
        raise ValueError(text)
    return int(number)


def to_float(text: str) -> float:
    number = float(text)
    if math.isnan(number):
        raise ValueError(text)
    return number


def to_bool(text: str) -> bool:
    answers = {
        "true": True,
        "1": True,
        "yes": True,
        "on": True,
        "false": False,
        "0": False,
        "no": False,
        "off": False,
    }
    if text.lower() not in answers:
        raise ValueError(text)
    return answers[text.lower()]


def to_list(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def to_text(value: Any) -> str:
    """What gives `value` when it is read again."""
    return ",".join(value) if isinstance(value, tuple) else str(value)


List = tuple[str, ...]
CONVERT: dict[Any, Any] = {int: to_int, float: to_float, bool: to_bool, str: str, List: to_list}
NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    List: "a list",
}
