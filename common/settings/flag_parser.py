"""FlagParser: an argparse parser whose errors are SettingErrors that name the flag at fault."""

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from common.settings.types import SettingError


class FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what argparse says, as `argument -p/--port: expected one argument`."""
        what, _, rest = message.partition(": ")
        if what == "unrecognized arguments":
            refuse_unknown(rest.split(), self)
        if what == "the following arguments are required":
            raise SettingError(rest, f"is missing; `{self.prog} --help` says what it is")
        raise SettingError(what.removeprefix("argument ").split("/")[-1], rest)


def refuse_unknown(words: Sequence[str], parser: argparse.ArgumentParser, hint: str = "") -> None:
    """Raise SettingError for the first of the words that a parser does not know, if there are any."""
    if words and not words[0].startswith("-"):
        raise SettingError("arguments", f"{words[0]!r} is not expected{hint}")
    if words:
        flag = words[0].split("=")[0]
        raise SettingError(flag, f"unknown flag{nearest(flag, parser)}")


def nearest(flag: str, parser: argparse.ArgumentParser) -> str:
    flags = [name for name in parser._option_string_actions if name.startswith("--")]
    matches = [
        name
        for name in difflib.get_close_matches(flag, flags, n=5, cutoff=0.8)
        if has_words(name, flag) or has_words(flag, name)
    ]
    return f"; the nearest is {matches[0]}" if matches else "; --help lists them"


def has_words(flag: str, other: str) -> bool:
    """Whether a flag has all words of another one, or such as look like them."""
    words = flag.removeprefix("--").split("-")
    return all(
        difflib.get_close_matches(word, words, cutoff=0.65) for word in other.removeprefix("--").split("-")
    )
