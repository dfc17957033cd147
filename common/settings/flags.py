"""Flags and variables: what a person gave, by the names of the fields of Settings."""

import argparse
import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from common.settings.compat import ALIASES, ANY, FLAG_ALIASES, OPTIONS, SHORT, VARIABLE_ALIASES, Option
from common.settings.types import List, SettingError, convert, parse

OTHERS = "Options of text-generation-inference and vLLM that are understood, too:"


@dataclasses.dataclass(frozen=True, slots=True)
class GivenValue:
    """One text that a person gave.

    Attributes:
        said: the name that the person used.
        target: the field of Settings or the option that it means.
    """

    said: str
    target: str
    text: str


class FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError("flags", message)


def read(cls: type[Any], argv: Sequence[str], environ: Mapping[str, str], prog: str) -> dict[str, Any]:
    """Values of fields of the dataclass `cls`: a flag wins over a variable, a variable of ours over another's
    name for it.

    Raises:
        SettingError: an unknown flag (the nearest of ours is named), a value of the wrong type or out of
            range, an option not served.
    """
    fields = {item.name: item for item in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    fixed: list[tuple[Option, GivenValue]] = []
    for given in (*variables(fields, environ), *flags(cls, argv, prog)):
        if given.target in fields:
            values[given.target] = parse(
                fields[given.target], plain(hints[given.target]), given.text, given.said
            )
        else:
            fixed.append((OPTIONS[given.target], given))
    for option, given in fixed:
        check_option(option, given, values.get(option.same_as))
    return values


def plain(hint: Any) -> Any:
    """`int` of `int | None`."""
    if hint == List:
        return hint
    return next((option for option in typing.get_args(hint) if option is not type(None)), hint)


def check_option(option: Option, given: GivenValue, own: Any) -> None:
    """Raises SettingError where the option asks for what is not the case."""
    value = convert(option.kind, given.text, given.said)
    accepted = [
        convert(option.kind, text, option.name) for text in option.accepts if option.accepts is not ANY
    ]
    if option.accepts is not ANY and value not in accepted and (own is None or value != own):
        raise SettingError(given.said, f"{'…' if option.secret else given.text} is not served: {option.why}")


# --- variables ----------------------------------------------------------------------------------------------


def variables(fields: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[GivenValue]:
    own = {name: name for name in (*fields, *(option.name for option in OPTIONS.values() if option.variable))}
    for said, target in (VARIABLE_ALIASES | ALIASES | own).items():  # our own last, so that it wins
        text = environ.get(said.upper(), "")
        if text != "":
            yield GivenValue(said, target, text)


# --- flags --------------------------------------------------------------------------------------------------


def flags(cls: type[Any], argv: Sequence[str], prog: str) -> Iterator[GivenValue]:
    found, unknown = flag_parser(cls, prog).parse_known_args(list(argv))
    if unknown and not unknown[0].startswith("-"):
        raise SettingError("arguments", f"{unknown[0]!r} is not expected")
    if unknown:
        raise SettingError(unknown[0].split("=")[0], f"unknown flag{nearest(cls, unknown[0])}")
    lists = {item.name for item in dataclasses.fields(cls) if item.type == List}
    said_as: dict[str, str] = {}
    for said, texts in vars(found).items():
        target = (FLAG_ALIASES | ALIASES).get(said, said)
        if target in said_as:
            raise SettingError(
                flag_of(said), f"means the same as {flag_of(said_as[target])}, which is given, too"
            )
        said_as[target] = said
        yield GivenValue(
            said if said == target else flag_of(said), target, ",".join(texts) if said in lists else texts[-1]
        )


def flag_parser(cls: type[Any], prog: str) -> FlagParser:
    parser = FlagParser(prog=prog, usage="%(prog)s [--setting X …]", allow_abbrev=False)
    for item in dataclasses.fields(cls):
        default = "" if item.default in (None, ()) else f", default {str(item.default).lower()}"
        add(
            parser,
            item.name,
            f"{item.metadata['help']} [{item.name.upper()}{default}]",
            is_switch=item.type is bool,
        )
    others = parser.add_argument_group("others", OTHERS)
    for option in OPTIONS.values():
        if option.flag:
            add(others, option.name, answer(option), is_switch=option.kind is bool)
    for name, target in (ALIASES | FLAG_ALIASES).items():
        add(
            others,
            name,
            f"see {flag_of(target)}",
            is_switch=target in OPTIONS and OPTIONS[target].kind is bool,
        )
    return parser


def add(parser: Any, name: str, help: str, is_switch: bool) -> None:
    names = [short for short, target in SHORT.items() if target == name] + [flag_of(name)]
    switch: dict[str, Any] = {"nargs": "?", "const": "true"} if is_switch else {}
    text = help.replace("%", "%%")
    parser.add_argument(
        *names, dest=name, action="append", help=text, default=argparse.SUPPRESS, metavar="X", **switch
    )


def answer(option: Option) -> str:
    """What becomes of an option, for whoever reads the help."""
    if option.accepts is ANY:
        return f"accepted: {option.why}"
    if option.same_as:
        return f"only what {flag_of(option.same_as)} says: {option.why}"
    return f"{'only ' + ' or '.join(option.accepts) if option.accepts else 'refused'}: {option.why}"


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def nearest(cls: type[Any], flag: str) -> str:
    fields = (item.name for item in dataclasses.fields(cls))
    ours = [
        flag_of(name)
        for name in (
            *fields,
            *ALIASES,
            *FLAG_ALIASES,
            *(option.name for option in OPTIONS.values() if option.flag),
        )
    ]
    match = difflib.get_close_matches(flag.split("=")[0], ours, n=1, cutoff=0.4)
    return f"; the nearest is {match[0]}" if match else ""
